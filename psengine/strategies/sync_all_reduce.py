"""Strategy "sync": every step, a collective averages the gradients of all replicas. Native DDP's semantics."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from typing_extensions import override

from psengine.codecs.base import Codec
from psengine.codecs.identity import IDENTITY
from psengine.codecs.registry import codec_for, resolve_codec
from psengine.collectives.base import CompletedWork, DeferredWork, Work
from psengine.errors import CommunicationHookError, ConfigurationError, ReductionError
from psengine.strategies.base import Capabilities, Strategy
from psengine.strategies.bucket_sums import BucketSums, TotalWeight, make_sum
from psengine.strategies.exchange import BucketExchange, CommHook, Step
from psengine.tensors.bucket import Bucket
from psengine.tensors.share import WHOLE, Share


class SyncAllReduce(Strategy):
    """Average each bucket over all ranks by one all-reduce; staleness 0, each worker steps its own optimizer.

    Args:
        compress: the codec of gradients, or its name. "bf16" and "fp16" halve the bytes and cost precision: each addend
            is rounded once, while gradients are packed, and the sum after each addition. None: values travel as they
            are.

    Raises:
        ConfigurationError: there is no such codec.
    """

    name = "sync"
    capabilities = Capabilities(pairs_by_position=True, exchanges_thawed=True)

    def __init__(self, *, compress: str | Codec | None = None) -> None:
        self._codec = resolve_codec(compress)
        self._hook: CommHook | None = None
        self._weight: TotalWeight | None = None
        self._scale = 1.0
        self._sums = BucketSums()

    @override
    def weigh(self, weight: float | None) -> None:
        """The ranks' weights are added up while forward ends and backward begins.

        Raises:
            ConfigurationError: a communication hook averages in the strategy's place.
        """
        if weight is not None and self._hook is not None:
            raise ConfigurationError(
                "a communication hook gets gradients as they are and averages them itself (expected no batch_weight,"
                f" got {weight:g}). Fix: leave out the hook, or weigh in the hook."
            )
        if self._weight is not None:
            _ = self._weight.value  # its forward may have had no backward
        self._weight = None if weight is None else TotalWeight(weight, self.collective, self.replica.device)

    @override
    def begin(self, step: Step) -> Share:
        """Divide by the number of contributing ranks while packing, or let a hook or the collective scale.

        Native DDP divides so too; it keeps low-precision sums from overflowing.

        Always while packing: by batch weights, which differ among ranks; for a codec, so that addends are rounded once;
        in ``join``, where ranks without data do not know the factor; and where the number of ranks is no power of two.
        There a quotient is not the product with the reciprocal, and native DDP has both: it divides gradients that are
        views of their bucket, and multiplies those that it copies.
        """
        self._scale = 1.0
        self._sums.begin()
        if self._weight is not None:
            return self._weight.share
        if self._hook is not None:
            return WHOLE
        self.collective.connect()
        is_exact = step.live_world_size.bit_count() == 1
        if is_exact and self._codec.is_lossless and not step.in_join and self.collective.scales_for_free:
            self._scale = 1.0 / step.live_world_size
            return WHOLE
        return Share(step.live_world_size)

    @property
    def needs_packing(self) -> bool:
        """False for a single replica: its gradients are their own average, unless a hook or a codec changes them, or
        they count nothing.
        """
        has_no_say = self._weight is not None and self._weight.weight == 0
        changes = self._hook is not None or not self._codec.is_lossless
        return self.collective.world_size > 1 or changes or has_no_say

    @override
    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, keeps_dtype: bool = False
    ) -> torch.Tensor:
        summed_dtype = codec_for(self._codec, dtype).summed_dtype(dtype)
        return self.collective.allocate(numel, dtype if keeps_dtype else summed_dtype or dtype, device)

    @override
    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        left_out = self._sums.residuals()
        self._sums = BucketSums(make_sum(bucket, self.collective, self._codec) for bucket in buckets)
        self._sums.take(left_out)

    @override
    def exchange(self, bucket: Bucket) -> BucketExchange:
        if self._hook is not None:
            return self._through_hook(bucket, self._hook)
        return self._sums[bucket.index].exchange(self._scale)

    @override
    def exchange_thawed(self, bucket: Bucket) -> BucketExchange:
        if self._hook is not None:
            return self._through_hook(bucket, self._hook)
        return make_sum(bucket, self.collective, IDENTITY).exchange(self._scale)

    def _through_hook(self, bucket: Bucket, hook: CommHook) -> BucketExchange:
        future, what = hook(bucket), f"communication hook for {bucket.describe()}"
        yield DeferredWork(functools.partial(self.collective.wait_for, future, what))
        value = future.value()
        result = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
        got = f"{result.numel()} elements" if isinstance(result, torch.Tensor) else type(result).__name__
        if not isinstance(result, torch.Tensor) or not (bucket.sparse or result.numel() == bucket.numel):
            raise CommunicationHookError(
                "a communication hook's future must hold a single tensor shaped like the bucket's buffer (expected"
                f" torch.Tensor of {bucket.numel} elements for {bucket.describe()}, got {got})"
            )
        return result

    @override
    def give_back(self, bucket: Bucket, unused: Sequence[bool] | None = None) -> None:
        self._sums[bucket.index].give_back(unused)

    @override
    def reduce_usage(self, used: torch.Tensor) -> Work:
        if self.collective.world_size == 1:
            return CompletedWork()
        return self.collective.all_reduce(used, what="used-parameter map")

    @override
    def average_loss(self, loss: float) -> float:
        """As the gradients of the same backward, the losses count by the ranks' weights."""
        weight = 1.0 if self._weight is None else self._weight.weight
        total = torch.tensor([loss * weight, weight], dtype=torch.float64, device=self.replica.device)
        self.collective.sum(total, what="losses of a closure")
        losses, weights = total.tolist()
        return float(losses / (weights or 1.0))

    @override
    def residuals(self) -> dict[str, torch.Tensor]:
        return self._sums.residuals()

    @override
    def take_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        self._sums.take(residuals)

    @override
    def equal_after(self, exchanges: int) -> int | None:
        """A communication hook may keep replicas apart for a while, as torch's post-local SGD does."""
        return exchanges if self._hook is None else None

    @override
    def register_comm_hook(self, hook: CommHook) -> None:
        """Let ``hook`` replace the all-reduce; gradients then reach it undivided, as with native DDP."""
        if not self._codec.is_lossless:
            raise ConfigurationError(
                f"a communication hook decides itself what travels (expected SyncAllReduce() without compress, got"
                f" {str(self._codec)!r}). Leave out compress=, or the hook."
            )
        if self._hook is not None:
            raise ReductionError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._hook = hook

    @override
    def close(self) -> None:
        super().close()
        self._weight, self._sums = None, BucketSums()
