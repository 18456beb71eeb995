"""Strategy "sync": every step, a collective averages the gradients of all replicas. Native DDP's semantics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import override

from psengine.collectives.base import Collective, CompletedWork, Work
from psengine.errors import CommunicationHookError, ConfigurationError, ReductionError
from psengine.strategies.base import Capabilities, Reduction, Replica, Strategy
from psengine.strategies.batch_weights import BatchWeights
from psengine.strategies.verification import verify_replicas
from psengine.tensors.bucket import Bucket
from psengine.tensors.share import WHOLE, Share

COMMUNICATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

CommHook = Callable[[Bucket], "torch.futures.Future[Any]"]


class SyncAllReduce(Strategy):
    """Average each bucket over all ranks by one all-reduce; staleness 0, each worker steps its own optimizer.

    Args:
        dtype: exchange wider gradients in this dtype (``torch.bfloat16``, ``torch.float16`` or ``torch.float32``, or
            its name), converted in the pass that packs and in the one that unpacks. Halves what travels and costs
            precision: each addend and the average are rounded once. None keeps the gradients' own.

    Raises:
        ConfigurationError: another dtype.
    """

    name = "sync"
    capabilities = Capabilities(gathers=True)

    def __init__(self, *, dtype: torch.dtype | str | None = None) -> None:
        self._dtype = _checked_dtype(dtype)
        self._collective: Collective | None = None
        self._hook: CommHook | None = None
        self._weights: BatchWeights | None = None
        self._scale = 1.0
        # By bucket: where gradients that stay views of their bucket are converted to on the way out.
        self._converted: dict[int, torch.Tensor] = {}

    def __repr__(self) -> str:
        return "SyncAllReduce()" if self._dtype is None else f"SyncAllReduce(dtype={self._dtype})"

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model is prepared anew, and registers its own hooks, as with native DDP.
        return {"dtype": self._dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(dtype=state["dtype"])  # type: ignore[misc]

    @property
    def collective(self) -> Collective:
        """The group of replicas; set by ``prepare``."""
        if self._collective is None:
            raise ReductionError("strategy 'sync' was not prepared; DistributedDataParallel does so when constructed")
        return self._collective

    @override
    def prepare(self, replica: Replica, *, synchronize: bool) -> None:
        """Rank 0's parameters and buffers overwrite everybody's."""
        if self._collective is not None:
            raise ConfigurationError(
                "a strategy object serves one wrapped model (got a second); make a psengine.SyncAllReduce() for each"
            )
        if synchronize:
            verify_replicas(replica.collective, replica.parameters, replica.state, replica.device)
            replica.collective.broadcast(list(replica.state.values()), 0, what="initial parameters and buffers")
        self._collective = replica.collective
        self._weights = BatchWeights(replica.collective, replica.device)

    @override
    def weigh(self, weight: float | None) -> None:
        """The ranks' weights are added up while forward ends and backward begins.

        Raises:
            ConfigurationError: a communication hook averages in the strategy's place.
        """
        if weight is not None and self._hook is not None:
            raise ConfigurationError(
                "a communication hook gets gradients as they are and averages them itself (expected batch_weight ="
                f" None, got {weight:g}). Fix: leave out the hook (strategy='sync:dtype=bfloat16' halves what travels),"
                " or weigh in the hook."
            )
        assert self._weights is not None, "weighed before it was prepared"
        self._weights.exchange(weight)

    def begin(self, live_world_size: int, *, in_join: bool = False) -> Share:
        """Divide by the number of contributing ranks while packing, unless a hook or the collective does the scaling;
        by weights, which differ from rank to rank, always while packing.

        Dividing before summing keeps low-precision sums from overflowing, and is what native DDP does. A narrower dtype
        is scaled while packing, so that addends are rounded once; and so it is in ``join``, where ranks without data do
        not know the factor.
        """
        self._scale = 1.0
        if self._weights is not None and self._weights.weight is not None:
            return self._weights.share()
        if self._hook is not None:
            return WHOLE
        if self._dtype is None and not in_join and self.collective.scales_for_free:
            self._scale = 1.0 / live_world_size
            return WHOLE
        return Share(live_world_size)

    @override
    def communication_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Only wider floats are converted."""
        is_wider = self._dtype is not None and dtype.is_floating_point and dtype.itemsize > self._dtype.itemsize
        return self._dtype if self._dtype is not None and is_wider else dtype

    @property
    def needs_packing(self) -> bool:
        """False for a single replica without a hook: its gradients are their own average, unless they count nothing."""
        has_no_say = self._weights is not None and self._weights.weight == 0
        return self.collective.world_size > 1 or self._hook is not None or has_no_say

    @override
    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.collective.allocate(numel, dtype, device)

    @override
    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        self._converted = {}
        for bucket in buckets:
            if not bucket.sparse and bucket.flat_dtype != self.communication_dtype(bucket.flat_dtype):
                dtype = self.communication_dtype(bucket.flat_dtype)
                self._converted[bucket.index] = self.allocate(bucket.numel, dtype, bucket.device)

    @override
    def reduce(self, bucket: Bucket) -> Reduction:
        if self._hook is not None:
            return _HookReduction(self.collective, bucket, self._hook(bucket))
        payload = self._converted.get(bucket.index, bucket.flat) if self._converted else bucket.flat
        if payload is not bucket.flat:
            bucket.convert_to(payload)
        work = self.collective.all_reduce(payload, self._scale, what=bucket.describe())
        return _SumReduction(payload, work)

    @override
    def reduce_usage(self, used: torch.Tensor) -> Work:
        if self.collective.world_size == 1:
            return CompletedWork()
        return self.collective.all_reduce(used, what="used-parameter map")

    @override
    def gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        return self.collective.all_gather(tensor, what=what)

    @override
    def broadcast(self, tensors: Sequence[torch.Tensor], source_rank: int = 0) -> None:
        self.collective.broadcast(tensors, source_rank, what="buffers")

    @override
    def wait_for(self, future: torch.futures.Future[Any], what: str) -> Any:
        return self.collective.wait_for(future, what)

    def register_comm_hook(self, hook: CommHook) -> None:
        """Let ``hook`` replace the all-reduce; gradients then reach it undivided, as with native DDP."""
        if self._dtype is not None:
            raise ConfigurationError(
                f"a communication hook decides itself what travels (expected SyncAllReduce() without dtype, got"
                f" {self._dtype}). Leave out dtype=, or the hook."
            )
        if self._hook is not None:
            raise ReductionError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._hook = hook

    @override
    def close(self) -> None:
        """The process group belongs to the caller and stays open."""
        self._collective = None
        self._weights = None


class _SumReduction(Reduction):
    """An all-reduce in place."""

    def __init__(self, flat: torch.Tensor, work: Work) -> None:
        self._flat = flat
        self._work = work

    def wait(self) -> torch.Tensor:
        self._work.wait()
        return self._flat


class _HookReduction(Reduction):
    """Whatever a communication hook's future will hold."""

    def __init__(self, collective: Collective, bucket: Bucket, future: torch.futures.Future[Any]) -> None:
        self._collective = collective
        self._bucket = bucket
        self._future = future

    def wait(self) -> torch.Tensor:
        what = f"communication hook for {self._bucket.describe()}"
        result = tensor_of_future(self._collective.wait_for(self._future, what))
        if not self._bucket.sparse and result.numel() != self._bucket.numel:
            raise CommunicationHookError(
                f"a communication hook's future must hold a single tensor shaped like the bucket's buffer (expected"
                f" {self._bucket.numel} elements for {self._bucket.describe()}, got {result.numel()})"
            )
        return result


def _checked_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    names = {str(choice).removeprefix("torch."): choice for choice in COMMUNICATION_DTYPES}
    chosen = names.get(dtype) if isinstance(dtype, str) else dtype
    if chosen is not None and chosen in COMMUNICATION_DTYPES:
        return chosen
    if dtype is None:
        return None
    raise ConfigurationError(f"SyncAllReduce: dtype must be None or one of {sorted(names)} (got {dtype!r})")


def tensor_of_future(value: Any) -> torch.Tensor:
    """The single tensor a communication hook's future must hold: itself, or the only element of a list."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], torch.Tensor):
        return value[0]
    raise CommunicationHookError(
        "a communication hook's future must hold a single tensor shaped like the bucket's buffer"
        f" (expected torch.Tensor, got {type(value).__name__})"
    )
