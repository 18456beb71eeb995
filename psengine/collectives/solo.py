"""A collective of one, for a worker without a process group: it meets the others at parameter servers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from psengine.collectives.base import Collective, CompletedWork, Work
from psengine.collectives.operands import check_flat, check_parts


class SoloCollective(Collective):
    """One rank; every operation is complete when called."""

    rank = 0
    world_size = 1
    timeout_s = 0.0

    @override
    def all_reduce(self, flat: torch.Tensor, scale: float = 1.0, *, what: str = "tensor") -> Work:
        check_flat(self, f"all-reduce of {what}", flat, scale)
        if scale != 1.0:
            flat.mul_(scale)
        return CompletedWork()

    @override
    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, what: str = "tensor") -> Work:
        check_parts(self, f"all-gather of {what}", output, tensor)
        output.view(-1).copy_(tensor.detach().reshape(-1))
        return CompletedWork()

    @override
    def all_to_all(
        self, output: torch.Tensor, flat: torch.Tensor, sizes: Sequence[int], senders: Sequence[int], *, what: str
    ) -> Work:
        output.view(-1).copy_(flat)
        return CompletedWork()

    @override
    def broadcast(self, tensors: Sequence[torch.Tensor], source_rank: int = 0, *, what: str = "tensors") -> Work:
        return CompletedWork()

    @override
    def barrier(self) -> Work:
        return CompletedWork()
