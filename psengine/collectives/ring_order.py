"""In which order gloo's all-reduce adds the ranks' values. Pure.

gloo sums dense CPU tensors of every size round a ring (gloo/allreduce.cc, ``ring``; checked with torch 2.13). W ranks
cut the tensor into W chunks of consecutive elements. Chunk c starts at rank c - 1 and each rank adds its own values to
what it receives, so every element of the chunk is::

    (((x[c-1] + x[c-2]) + x[c-3]) + ...) + x[c]         ranks modulo W, rounded to the dtype after each addition

The chunks depend on the size of the whole tensor: gloo sends segments of at most 1 MiB, two a rank at least, all of one
size, and a chunk is a whole number of segments. The last chunks of a small tensor are short or empty.

csrc/shared_memory/ring.h has the same rule in C++.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

MAX_SEGMENT_BYTES = 1024 * 1024


class Stretch(NamedTuple):
    """Consecutive elements of a tensor that are added in one order.

    Attributes:
        first: the first element.
        last: the one after its last.
        ranks: whose values are added, in this order.
    """

    first: int
    last: int
    ranks: tuple[int, ...]


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


def ranks_of_chunk(chunk: int, world_size: int) -> tuple[int, ...]:
    """The ranks in the order in which their values are added in ``chunk``."""
    return tuple((chunk - 1 - step) % world_size for step in range(world_size))


def stretches(
    numel: int, element_bytes: int, world_size: int, first: int = 0, last: int | None = None
) -> Iterator[Stretch]:
    """Yield the stretches of the elements ``first`` to ``last`` of a tensor of ``numel`` elements.

    Args:
        numel: as for ``chunk_numel``.
        element_bytes: as for ``chunk_numel``.
        world_size: number of ranks.
        first: where to begin.
        last: where to end; None: at the tensor's end.
    """
    last = numel if last is None else last
    each = chunk_numel(numel, element_bytes, world_size)
    while first < last:
        chunk = first // each
        end = min(last, (chunk + 1) * each)
        yield Stretch(first, end, ranks_of_chunk(chunk, world_size))
        first = end


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
