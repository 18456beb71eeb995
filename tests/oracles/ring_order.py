"""What gloo's all-reduce adds, in its order, in plain torch.

gloo sums dense CPU tensors of every size round a ring (gloo/allreduce.cc, ``ring``; checked with torch 2.13). W ranks
cut the tensor into W chunks of consecutive elements. Chunk c starts at rank c - 1 and each rank adds its own values to
what it receives, so every element of the chunk is::

    (((x[c-1] + x[c-2]) + x[c-3]) + ...) + x[c]         ranks modulo W, rounded to the dtype after each addition

The chunks depend on the size of the whole tensor: gloo sends segments of at most 1 MiB, two a rank at least, all of one
size, and a chunk is a whole number of segments. The last chunks of a small tensor are short or empty.

csrc/shared_memory/ring.h has the same rule in C++.
"""

from collections.abc import Sequence

import torch

MAX_SEGMENT_BYTES = 1024 * 1024


def chunk_numel(numel: int, element_bytes: int, world_size: int) -> int:
    """Elements of a chunk, before the last chunks are cut at the tensor's end; at least 1.

    Args:
        numel: elements of the whole tensor; a complex one counts as twice as many real ones.
        element_bytes: of one of those.
        world_size: number of ranks.
    """
    max_segment = element_bytes * max(1, MAX_SEGMENT_BYTES // element_bytes)
    size_bytes = numel * element_bytes
    segments = _round_up(max(-(-size_bytes // max_segment), 2 * world_size), world_size)
    segment_bytes = _round_up(max(1, -(-size_bytes // segments)), element_bytes)
    return segments // world_size * (segment_bytes // element_bytes)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def add_in_ring_order(addends: Sequence[torch.Tensor], output: torch.Tensor) -> None:
    """Write to ``output`` what gloo's all-reduce gives. Mutates ``output``.

    Args:
        addends: by rank, that rank's values; contiguous tensors of one dtype and numel.
        output: contiguous, of that dtype and numel. May be the memory of one addend.
    """
    real = [(torch.view_as_real(a) if a.is_complex() else a).view(-1) for a in addends]
    place = (torch.view_as_real(output) if output.is_complex() else output).view(-1)
    world_size, each = len(real), chunk_numel(place.numel(), place.element_size(), len(real))
    for chunk, first in enumerate(range(0, place.numel(), each)):
        parts = [real[(chunk - 1 - step) % world_size][first : first + each] for step in range(world_size)]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        place[first : first + each] = total
