"""A collective of one, for a worker without a process group: it meets the others at parameter servers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psengine.collectives.base import Collective, CompletedWork, Work


class SoloCollective(Collective):
    """One rank; every operation is complete when called."""

    rank = 0
    world_size = 1
    timeout_s = 0.0

    def all_reduce(self, flat: torch.Tensor, scale: float = 1.0, *, what: str = "tensor") -> Work:
        """See ``Collective.all_reduce``."""
        if scale != 1.0:
            flat.mul_(scale)
        return CompletedWork()

    def broadcast(self, tensors: Sequence[torch.Tensor], source_rank: int = 0, *, what: str = "tensors") -> None:
        """See ``Collective.broadcast``; leaves ``tensors`` as they are."""

    def all_gather(self, tensor: torch.Tensor, *, what: str = "tensor") -> list[torch.Tensor]:
        """See ``Collective.all_gather``."""
        return [tensor.clone()]

    def barrier(self, timeout_s: float | None = None) -> None:
        """See ``Collective.barrier``."""
