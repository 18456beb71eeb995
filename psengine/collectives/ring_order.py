"""In which order gloo's all-reduce adds, in plain torch; csrc/shared_memory/ring.h has the whole rule. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch

MAX_SEGMENT_BYTES = 1024 * 1024


def ring_chunk_numel(numel: int, element_bytes: int, world_size: int) -> int:
    """Elements of a chunk of a tensor of ``numel`` real numbers; the last chunks end with the tensor."""
    max_segment = element_bytes * max(1, MAX_SEGMENT_BYTES // element_bytes)
    size_bytes = numel * element_bytes
    segments = _round_up(max(-(-size_bytes // max_segment), 2 * world_size), world_size)
    segment_bytes = _round_up(max(1, -(-size_bytes // segments)), element_bytes)
    return segments // world_size * (segment_bytes // element_bytes)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def add_in_ring_order(addends: Sequence[torch.Tensor], total: torch.Tensor, first: int, numel: int) -> None:
    """Write to ``total`` a part of the sum that gloo's all-reduce gives over as many ranks as there are addends.

    Args:
        addends: by rank, its values of the part; flat, of real numbers.
        total: flat, of the same numel and dtype; mutated. Not the memory of an addend.
        first: where in the whole tensor the part begins.
        numel: of the whole tensor.
    """
    count = len(addends)
    chunk_numel = ring_chunk_numel(numel, total.element_size(), count)
    begin = 0
    while begin < total.numel():
        chunk = (first + begin) // chunk_numel
        end = min(total.numel(), (chunk + 1) * chunk_numel - first)
        place = total[begin:end].copy_(addends[(chunk - 1) % count][begin:end])
        for step in range(1, count):
            place += addends[(chunk - 1 - step) % count][begin:end]
        begin = end
