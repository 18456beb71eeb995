"""The first of a strategy's interfaces: how the gradients of a backward travel, bucket by bucket.

The exchange of a bucket is a generator. It begins operations, yields what it waits for, and returns the result::

    reducer    first gradient  bucket 0 full    bucket 1 full    end of backward
    driver                     begin(0)         begin(1)         finish()  result(0)    result(1)    the rest .wait()
    exchange   begin(step)     0 to its yield   1 to its yield             0 to its end 1 to its end
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import torch

from psengine.collectives.base import CompletedWork, Intermediate, Work
from psengine.errors import ConfigurationError
from psengine.strategies.replica_watch import ReplicaWatch
from psengine.tensors.bucket import Bucket
from psengine.tensors.share import WHOLE, Share

BucketExchange: TypeAlias = Generator[Work, None, "torch.Tensor | None"]
CommHook = Callable[[Bucket], "torch.futures.Future[Any]"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A backward whose gradients are exchanged.

    Attributes:
        live_world_size: how many ranks contribute gradients.
        in_join: ranks without data may take part with zeros, and do not know how many ranks have some.
    """

    live_world_size: int
    in_join: bool = False


class Driver:
    """Runs the exchanges of some buckets: ``begin`` for each, then ``result`` for each, in the same order on all ranks.

    Args:
        exchange: makes the exchange of a bucket, such as ``Exchange.exchange``.
    """

    def __init__(self, exchange: Callable[[Bucket], BucketExchange]) -> None:
        self._exchange = exchange
        self.clear()

    def clear(self) -> None:
        """Forget what was begun, after a failure."""
        # By index of the bucket: what runs, with what it waits for, and the results of what is over.
        self._running: dict[int, tuple[BucketExchange, Work]] = {}
        self._results: dict[int, torch.Tensor | None] = {}
        self._intermediate: list[int] = []

    def begin(self, bucket: Bucket) -> None:
        """Begin the exchange of ``bucket``, without blocking."""
        index, exchange = bucket.index, self._exchange(bucket)
        work = self._next_work(index, exchange)
        if work is not None:
            self._running[index] = exchange, work
            if type(work) is Intermediate:  # isinstance of an abstract class costs more than all the rest
                self._intermediate.append(index)

    def _next_work(self, index: int, exchange: BucketExchange) -> Work | None:
        """Go on until the exchange waits again, and return for what; None: it is over."""
        try:
            return next(exchange)
        except StopIteration as ended:
            self._results[index] = ended.value
            return None

    def result(self, bucket: Bucket) -> torch.Tensor | None:
        """Wait for ``bucket``'s exchange; return what it returned. None where it was not begun.

        Raises:
            CollectiveError: an exchange failed or passed its deadline; the message names who is missing.
        """
        if self._intermediate:
            # Second operations begin in the order of buckets, so that they travel while results are decoded.
            begun, self._intermediate = self._intermediate, []
            for index in begun:
                self._run(index, to_end=False)
        if bucket.index in self._running:
            self._run(bucket.index, to_end=True)
        return self._results.pop(bucket.index, None)

    def _run(self, index: int, *, to_end: bool) -> None:
        """Go on, to the end or until what is waited for is not intermediate."""
        exchange, work = self._running.pop(index)
        while to_end or type(work) is Intermediate:
            work.wait()
            following = self._next_work(index, exchange)
            if following is None:
                return
            work = following
        self._running[index] = exchange, work


class Gradients(Protocol):
    """What a strategy may ask of the reducer, where buckets are exchanged at another time than in a backward."""

    @property
    def arrival_order(self) -> list[int] | None:
        """Indices of parameters as the gradients of the last backward arrived; None where that was not noted."""

    @property
    def watch(self) -> ReplicaWatch:
        """Compares this replica with the others."""

    @property
    def awaits_order(self) -> bool:
        """Whether buckets are still to be laid out in the order in which gradients arrive."""

    def pack_in(self, slot: int) -> None:
        """The gradients of the coming backward belong to ``slot``; see ``Exchange.slots``."""

    def lay_out_again(self, order: Sequence[int] | None = None) -> None:
        """Make all buckets anew, between two backwards.

        Args:
            order: in which gradients arrive; None: the buckets stay alike, in other memory.
        """

    def write(self, bucket: Bucket, result: torch.Tensor, used: Sequence[float] | None) -> None:
        """Make ``result``, laid out like the bucket, its gradients.

        Args:
            bucket: one of those laid out last.
            result: the averages.
            used: by parameter, 0 where its gradient stays as it is; None: none does.
        """


class Exchange:
    """How gradients travel. Buckets come in the same order on every rank.

    Attributes:
        name: what users write to get the strategy.
    """

    name: ClassVar[str]

    @property
    def needs_packing(self) -> bool:
        """False where gradients are final as computed (one replica), so that the reducer copies nothing."""
        return True

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, keeps_dtype: bool = False
    ) -> torch.Tensor:
        """Return an uninitialised flat tensor for a bucket, in the memory this strategy exchanges best.

        It may have another dtype, to which packing converts; not with ``keeps_dtype``, for gradients that are views.
        """
        return torch.empty(numel, dtype=dtype, device=device)

    @property
    def slots(self) -> int:
        """The gradients of how many backwards are kept apart, each packed in memory of its own."""
        return 1

    def slot_memory(self, index: int, slot: int) -> torch.Tensor:
        """Where bucket ``index`` is packed in ``slot`` > 0; ``allocate`` has made that of slot 0."""
        raise NotImplementedError

    def serve(self, gradients: Gradients) -> None:
        """The reducer is being made, and will ask for memory of its buckets."""

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        """The reducer has made its buckets, or remade them. No values travel here."""

    def weigh(self, weight: float | None) -> None:
        """Before ``begin``, on every rank: the coming backward's result is sum(weight * gradient) / sum(weight), where
        ``weight`` is this replica's number of samples, >= 0. None: all replicas count alike.

        Raises:
            ConfigurationError: the strategy cannot weigh gradients.
        """
        if weight is not None:
            raise ConfigurationError(
                f"strategy {self.name!r} does not average gradients by samples (expected no batch_weight, got"
                f" {weight:g}). Fix: do not call model.batch_weight, or use strategy='sync'."
            )

    def begin(self, step: Step) -> Share:
        """The first gradient of a backward is ready; return the share that the reducer applies while it packs."""
        return WHOLE

    def exchange(self, bucket: Bucket) -> BucketExchange:
        """Exchange a packed bucket. The first ``next`` begins it without blocking.

        Until it ends, ``bucket.flat`` is the strategy's.

        Yields:
            Each operation that it waits for.

        Returns:
            The reduced gradients, laid out like ``bucket.flat`` (often that very tensor). None: they stay what this
            process computed, because the strategy applies them elsewhere, or later. That is the default.
        """
        yield from ()
        return None

    def exchange_thawed(self, bucket: Bucket) -> BucketExchange:
        """``exchange`` of a parameter that was thawed, after the backward, where ``Capabilities.exchanges_thawed``."""
        raise NotImplementedError

    def give_back(self, bucket: Bucket, unused: Sequence[bool] | None = None) -> None:
        """What this backward sent of the bucket did not count, so a codec's residual is as before.

        Args:
            bucket: whose result came.
            unused: for each parameter of the bucket, whether that is said of it; None: of all.
        """

    def reduce_usage(self, used: torch.Tensor) -> Work:
        """Begin to sum over ranks, in place, which parameters this backward used (int32, 1 or 0 by index).

        Default: the parameters that this replica used count.
        """
        return CompletedWork()

    def finish(self) -> Work:
        """Every bucket of this backward was handed over: begin to exchange the rest, such as buffers.

        The work is waited for after the exchanges; then ``step`` may use the gradients.
        """
        return CompletedWork()

    def shadow_step(self) -> None:
        """Inside ``join``, on a rank without data: the other ranks step, after the backward that was shadowed."""

    def register_comm_hook(self, hook: CommHook) -> None:
        """Let ``hook`` exchange buckets in the strategy's place, where the strategy permits it."""
        raise ConfigurationError(
            f"strategy {self!r} exchanges gradients itself and takes no communication hook; use strategy='sync'"
        )
