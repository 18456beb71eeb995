"""A collective of one, for a worker without a process group: it meets the others at parameter servers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from psengine.collectives.base import Collective, CompletedWork, Work


class SoloCollective(Collective):
    """One rank; every operation is complete when called."""

    rank = 0
    world_size = 1
    timeout_s = 0.0

    @override
    def all_reduce(self, flat: torch.Tensor, scale: float = 1.0, *, what: str = "tensor") -> Work:
        if scale != 1.0:
            flat.mul_(scale)
        return CompletedWork()

    @override
    def broadcast(self, tensors: Sequence[torch.Tensor], source_rank: int = 0, *, what: str = "tensors") -> None:
        """Leaves ``tensors`` as they are."""

    @override
    def all_gather(self, tensor: torch.Tensor, *, what: str = "tensor") -> list[torch.Tensor]:
        return [tensor.clone()]

    @override
    def barrier(self, timeout_s: float | None = None) -> None:
        pass
