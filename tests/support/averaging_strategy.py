"""The trial of the strategy seam: replicas train by themselves, and average their parameters now and then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from psengine import Strategy
from psengine.strategies.base import Capabilities
from psengine.tensors.bucket import Bucket
from psengine.tensors.share import Share


class Averaging(Strategy):
    """Average the parameters of all replicas after every ``every`` steps (local SGD, https://arxiv.org/abs/1805.09767).

    Args:
        every: number of steps between two averages.
    """

    name = "averaging"
    capabilities = Capabilities(keeps_first_layout=True, averages_gradients=False)

    def __init__(self, every: int = 4) -> None:
        self.every = every
        self._steps = 0
        self._buckets: list[Bucket] = []

    @property
    @override
    def needs_packing(self) -> bool:
        return False

    @override
    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        # Buckets of its own: where gradients are views of the reducer's, those must stay what they are.
        self._buckets = [
            Bucket(
                bucket.index,
                tuple(range(len(bucket.parameters))),
                bucket.parameters,
                bucket.names,
                sparse=False,
                allocate=self.collective.allocate,
            )
            for bucket in buckets
        ]

    @override
    def step(self, local_step: Callable[[], Any], closure: Callable[[], Any] | None = None) -> Any:
        result = local_step()
        self._steps += 1
        if self._steps % self.every == 0:
            with torch.no_grad():
                self._average()
        return result

    def _average(self) -> None:
        share = Share(self.collective.world_size)
        works = []
        for bucket in self._buckets:
            bucket.pack(bucket.parameters, share)
            works.append(self.collective.all_reduce(bucket.flat, what=f"parameters of {bucket.describe()}"))
        for bucket, work in zip(self._buckets, works, strict=True):
            work.wait()
            bucket.unpack(bucket.parameters, bucket.flat)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps = state["steps"]
