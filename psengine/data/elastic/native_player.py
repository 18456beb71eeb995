"""Without virtual workers, as under native DDP: each rank plays one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from psengine.data.value_exchange import ValueExchange


class NativePlayer:
    """The part of ``strategies.elastic.player.Player`` in a training whose workers neither die nor join.

    Each rank of the default process group plays the virtual worker of its number, and begins with step 1. Gradients are
    averaged by whatever wraps the model: native DDP, or a strategy without virtual workers.
    """

    def __init__(self) -> None:
        self._exchange = ValueExchange("ElasticLoader", None)
        self.virtual_workers = self._exchange.collective.world_size
        self.recorded: list[float] = []
        self.playing: int | None = None
        self._value: float | None = None

    def enter(self, facts: Mapping[str, str]) -> int:
        self._exchange.check(facts)
        return 1

    def begin_step(self, step: int) -> None:
        self.playing = self._value = None

    def upcoming(self) -> Sequence[int]:
        return [self._exchange.collective.rank]

    def next_virtual_worker(self) -> int | None:
        if self.playing is None:
            self.playing = self._exchange.collective.rank
            return self.playing
        self.playing = None
        self.recorded = [math.nan] * self.virtual_workers
        # All ranks run the same program, so all recorded something or none did.
        if self._value is not None:
            value = torch.tensor([self._value], dtype=torch.float64, device=self._exchange.device)
            values = self._exchange.collective.gather(value, what="what Step.record() was given")
            self.recorded = [one.item() for one in values]
        return None

    def record(self, value: float) -> None:
        self._value = value

    def leave(self) -> None:
        pass
