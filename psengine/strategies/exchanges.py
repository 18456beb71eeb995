"""The exchanges of a model's buckets, and what their codecs left out, by name of the parameter."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from psengine.codecs.base import Codec
from psengine.collectives.base import Collective
from psengine.errors import ConfigurationError
from psengine.strategies.base import Strategy
from psengine.strategies.bucket_exchange import BucketExchange, PendingQueue, make_exchange
from psengine.tensors.bucket import Bucket


class Exchanges:
    """The exchange of each bucket, by index. Residuals of ``former``, in another layout, move with their parameters."""

    def __init__(
        self, buckets: Sequence[Bucket], collective: Collective, codec: Codec, former: Exchanges | None = None
    ) -> None:
        self.buckets = buckets
        self._queue: PendingQueue = deque()
        self._exchanges = [make_exchange(bucket, collective, codec, self._queue) for bucket in buckets]
        if former is not None:
            self.take(former.residuals())

    def __getitem__(self, index: int) -> BucketExchange:
        return self._exchanges[index]

    def __iter__(self) -> Iterator[BucketExchange]:
        return iter(self._exchanges)

    def begin(self) -> None:
        """A backward begins; one that failed may have left reductions."""
        self._queue.clear()
        self._end_last()
        for exchange in self._exchanges:
            exchange.has_sent = exchange.is_spoiled = False

    def _end_last(self) -> None:
        """Training code skips a step whose gradients are not finite, so of the last backward nothing counted. All ranks
        have the same sums.
        """
        if any(exchange.is_spoiled for exchange in self._exchanges):
            for exchange in self._exchanges:
                exchange.give_back()

    def residuals(self) -> dict[str, torch.Tensor]:
        """What this rank left out, by name of the parameter; not to be written."""
        self._end_last()
        return {
            name: residual
            for exchange in self._exchanges
            if (whole := exchange.left_out()) is not None
            for name, residual in zip(exchange.bucket.names, exchange.bucket.views_of(whole), strict=True)
        }

    def load(self, strategy: Strategy, state: Mapping[str, Any]) -> None:
        """Take over the residuals of a checkpoint. Raises ConfigurationError: it has those of other parameters."""
        load_residuals(strategy, dict(self._places()), state)
        self._settle()

    def reset(self) -> None:
        """Nothing was left out."""
        for exchange in self._exchanges:
            exchange.take_left_out()
            if exchange.state is not None:
                exchange.state.reset()

    def take(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Go on with what ``residuals`` of others with these parameters returned; KeyError where one is missing."""
        for name, place in self._places() if residuals else ():
            place.copy_(residuals[name])
        self._settle()

    def _places(self) -> Iterator[tuple[str, torch.Tensor]]:
        for exchange in self._exchanges:
            if exchange.state is not None:
                views = exchange.bucket.views_of(exchange.state.residual)
                yield from zip(exchange.bucket.names, views, strict=True)

    def _settle(self) -> None:
        for exchange in self._exchanges:
            exchange.take_left_out()


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
