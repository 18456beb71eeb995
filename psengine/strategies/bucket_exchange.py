"""Sums one bucket's values over the ranks of a collective, encoded or not.

::

    summed as packed   values ───────────── all-reduce ────────────────────────────► sum
    summed payload     values ─ encode ─► payload ─ all-reduce ────────────────────► sum, in the payload's dtype
    gathered payloads  values ─ encode ─► payload ─ all-gather ─► decode each, add ─► sum
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from psengine.codecs.base import Codec
from psengine.codecs.identity import IDENTITY
from psengine.codecs.registry import codec_for
from psengine.collectives.base import Collective, Work
from psengine.errors import ConfigurationError
from psengine.strategies.base import Strategy
from psengine.strategies.exchange import Reduction
from psengine.tensors.bucket import Bucket


class BucketExchange(ABC):
    """The exchange of one bucket, made when buckets are laid out, used in every step. ``codec`` covers its dtype."""

    def __init__(self, bucket: Bucket, collective: Collective, codec: Codec = IDENTITY) -> None:
        self.bucket = bucket
        self.state = None if bucket.sparse else codec.make_state(bucket.numel, bucket.dtype, bucket.device)
        self._collective = collective
        self._codec = codec
        self._what = bucket.describe()

    @abstractmethod
    def reduce(self, scale: float) -> Reduction:
        """Begin to sum the packed gradients over ranks, times ``scale``."""


class SummedAsPacked(BucketExchange):
    """Packing wrote the payload: values, perhaps in a narrower dtype, or a sparse gradient."""

    @override
    def reduce(self, scale: float) -> Reduction:
        flat = self.bucket.flat
        return _Sum(flat, self._collective.all_reduce(flat, scale, what=self._what))


class SummedPayload(BucketExchange):
    """Gradients are views of the bucket's values, so the payload is another tensor; the collective sums payloads."""

    def __init__(self, bucket: Bucket, collective: Collective, codec: Codec) -> None:
        super().__init__(bucket, collective, codec)
        spec = codec.payload_spec(bucket.numel, bucket.dtype)
        self._payload = collective.allocate(spec.numel, spec.dtype, bucket.device)

    @override
    def reduce(self, scale: float) -> Reduction:
        self._codec.encode(self.bucket.flat, self._payload)
        self.bucket.note_encoded(self._payload)
        return _Sum(self._payload, self._collective.all_reduce(self._payload, scale, what=self._what))


class GatheredPayloads(BucketExchange):
    """Payloads that no collective can sum: each rank decodes those of all, and sums in the order of ranks."""

    def __init__(self, bucket: Bucket, collective: Collective, codec: Codec) -> None:
        super().__init__(bucket, collective, codec)
        spec = codec.payload_spec(bucket.numel, bucket.dtype)
        self._payload = torch.empty(spec.numel, dtype=spec.dtype, device=bucket.device)
        self._gathered = self._payload.new_empty((collective.world_size, spec.numel))

    @override
    def reduce(self, scale: float) -> Reduction:
        self._codec.encode(self.bucket.flat, self._payload, self.state)
        work = self._collective.all_gather(self._gathered, self._payload, what=self._what)
        return _DecodedSum(self, self._codec, self._gathered, scale, work)


class _Sum(Reduction):
    """An all-reduce in place."""

    def __init__(self, payload: torch.Tensor, work: Work) -> None:
        self._payload = payload
        self._work = work

    @override
    def wait(self) -> torch.Tensor:
        self._work.wait()
        return self._payload


class _DecodedSum(Reduction):
    """An all-gather; ``wait`` decodes the payloads."""

    def __init__(
        self, exchange: BucketExchange, codec: Codec, gathered: torch.Tensor, scale: float, work: Work
    ) -> None:
        self._exchange = exchange
        self._codec = codec
        self._gathered = gathered
        self._scale = scale
        self._work = work

    @override
    def wait(self) -> torch.Tensor:
        self._work.wait()
        total = self._exchange.bucket.flat
        self._codec.decode(self._gathered[0], total)
        addend = torch.empty_like(total)
        for payload in self._gathered[1:]:
            self._codec.decode(payload, addend)
            total.add_(addend)
        if self._scale != 1:
            total.mul_(self._scale)
        return total

    @override
    def drop(self) -> None:
        self._work.wait()
        if self._exchange.state is not None:
            self._exchange.state.give_back()


def make_exchanges(
    buckets: Sequence[Bucket], collective: Collective, codec: Codec, former: Sequence[BucketExchange] = ()
) -> list[BucketExchange]:
    """Return the exchange of each bucket. Residuals of ``former``, in another layout, move with their parameters."""
    exchanges = [_make_exchange(bucket, collective, codec) for bucket in buckets]
    residuals = residuals_of(former)
    for name, residual in residuals_of(exchanges).items() if residuals else ():
        residual.copy_(residuals[name])
    return exchanges


def residuals_of(exchanges: Sequence[BucketExchange]) -> dict[str, torch.Tensor]:
    """The residuals by name of the parameter: views of the codecs' states."""
    return {
        name: residual
        for exchange in exchanges
        if exchange.state is not None
        for name, residual in zip(exchange.bucket.names, exchange.bucket.views_of(exchange.state.residual), strict=True)
    }


def load_residuals(strategy: Strategy, residuals: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
    """Overwrite ``residuals``, views of a strategy's codec states, by those of a checkpoint.

    Raises:
        ConfigurationError: the checkpoint has other ones.
    """
    if set(state) != set(residuals):
        raise ConfigurationError(
            f"the saved residuals are not those of {strategy!r} (expected {sorted(residuals) or 'none'}, got"
            f" {sorted(state) or 'none'}). Fix: use the same compress=, or leave out the strategy's state."
        )
    for name, residual in residuals.items():
        residual.copy_(state[name])


def _make_exchange(bucket: Bucket, collective: Collective, codec: Codec) -> BucketExchange:
    if bucket.sparse:
        return SummedAsPacked(bucket, collective)
    codec = codec_for(codec, bucket.dtype)
    summed_dtype = codec.summed_dtype(bucket.dtype)
    if summed_dtype is bucket.flat.dtype:
        return SummedAsPacked(bucket, collective)
    return (GatheredPayloads if summed_dtype is None else SummedPayload)(bucket, collective, codec)
