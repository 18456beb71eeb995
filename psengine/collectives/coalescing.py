"""Many tensors as few messages: those of one dtype and device travel together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psengine.collectives.operands import real

# Native DDP's coalescing size for broadcasts (torch/nn/parallel/distributed.py, broadcast_bucket_size).
BROADCAST_BUCKET_BYTES = 250 * 1024 * 1024


def coalesce(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors, real and detached, by dtype and device into messages of at most ``BROADCAST_BUCKET_BYTES``."""
    groups: list[list[torch.Tensor]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], int]] = {}
    for tensor in tensors:
        part = real(tensor.detach())
        size_bytes = part.numel() * part.element_size()
        group, group_bytes = open_groups.get((part.dtype, part.device), ([], 0))
        if not group or group_bytes + size_bytes > BROADCAST_BUCKET_BYTES:
            group, group_bytes = [], 0
            groups.append(group)
        group.append(part)
        open_groups[part.dtype, part.device] = (group, group_bytes + size_bytes)
    return groups


def copy_out(payload: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Copy a message's content to the tensors of its group."""
    parts = payload.split([t.numel() for t in tensors])
    torch._foreach_copy_(tensors, [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)])
