"""The first of a strategy's interfaces: how the gradients of a backward travel, bucket by bucket.

One backward pass; the reducer calls, the exchange answers::

    reducer    first gradient  bucket 0 full   bucket 1 full   end of backward
    exchange   begin(step)     reduce(0) ────► reduce(1) ────► finish() ─ 0.wait() ─ 1.wait() ─ the rest .wait()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from psengine.collectives.base import CompletedWork, Work
from psengine.errors import ConfigurationError
from psengine.tensors.bucket import Bucket
from psengine.tensors.share import WHOLE, Share

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


class Reduction(ABC):
    """The exchange of one bucket's gradients, in flight.

    Attributes:
        is_superseded: whether the result of ``wait`` is out of date, so that the caller waits again. Asked after all
            waits of a backward: a worker that lost its membership and joined again takes part in a later step, with
            every bucket.
    """

    is_superseded = False

    @abstractmethod
    def wait(self) -> torch.Tensor | None:
        """Return the reduced gradients, laid out like ``Bucket.flat`` (often that very tensor).

        None: gradients stay what this process computed, because the strategy applies them elsewhere, or later.

        Raises:
            CollectiveError: the exchange failed or passed its deadline; the message names who is missing.
        """

    def drop(self) -> None:
        """``wait``, and drop the result: a codec's residual is as before."""
        self.wait()

    def spare(self, unused: Sequence[bool]) -> None:  # noqa: B027 - most keep no residual
        """After ``wait``: no rank used these parameters of the bucket. Their gradients stay what they are, and so does
        a codec's residual.
        """


class StaysLocal(Reduction):
    """Gradients stay what this process computed."""

    def wait(self) -> None:
        """Return at once."""
        return


class Exchange(ABC):
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

    def lay_out(self, buckets: Sequence[Bucket]) -> None:  # noqa: B027 - most strategies take buckets as they come
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

    @abstractmethod
    def reduce(self, bucket: Bucket) -> Reduction:
        """Begin to exchange a packed bucket, without blocking. ``bucket.flat`` is the strategy's until the wait."""

    def reduce_usage(self, used: torch.Tensor) -> Work:
        """Begin to sum over ranks, in place, which parameters this backward used (int32, 1 or 0 by index).

        Default: the parameters that this replica used count.
        """
        return CompletedWork()

    def finish(self) -> Work:
        """Every bucket of this backward was handed over: begin to exchange the rest, such as buffers.

        The work is waited for after the reductions; then ``step`` may use the gradients.
        """
        return CompletedWork()

    def shadow_step(self) -> None:  # noqa: B027 - in most strategies a step exchanges nothing
        """Inside ``join``, on a rank without data: the other ranks step, after the backward that was shadowed."""

    def whole_norm(self, norm: torch.Tensor, norm_type: float) -> torch.Tensor:
        """The norm of all gradients from ``norm``, that of those which this replica holds after backward.

        Default: it holds all. All ranks call it.
        """
        return norm

    def register_comm_hook(self, hook: CommHook) -> None:
        """Let ``hook`` exchange buckets in the strategy's place, where the strategy permits it."""
        raise ConfigurationError(
            f"strategy {self.name!r} exchanges gradients itself and takes no communication hook; use strategy='sync'"
        )
