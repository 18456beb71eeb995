"""Parameters become chunks, chunks go to shards. Pure: the same tensors give the same cut on every worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from psengine.errors import ConfigurationError
from psengine.protocol.layout import ChunkKind, ChunkSpec, Segment
from psengine.protocol.messages import DTYPE_NUMBERS, MAX_NAME_CHARS, MAX_SEGMENTS

# Smaller chunks overlap better with backward and cost more messages; larger ones stall behind each other.
CHUNK_BYTES = 1024 * 1024

# Inner cuts fall on multiples of this many elements, so that no chunk but a tensor's first begins off a cache line.
ALIGNMENT_NUMEL = 64

# Of a chunk's description in a body; a page of CHUNKS has 48 KiB.
MAX_DESCRIPTION_BYTES = 40 * 1024

TensorDescription = tuple[str, tuple[int, ...], tuple[int, ...], int]


def cut(
    kind: ChunkKind,
    tensors: Sequence[TensorDescription],
    dtype: torch.dtype,
    first_key: int,
    chunk_bytes: int = CHUNK_BYTES,
) -> list[ChunkSpec]:
    """Lay tensors flat, one after the other, and cut them into chunks of about equal size.

    Args:
        kind: what the tensors are.
        tensors: (name, shape, strides in elements, numel) each, in order; those without elements are left out.
        dtype: of all of them.
        first_key: key of the first chunk; the others follow.
        chunk_bytes: most bytes in a chunk, from one element to MAX_PAYLOAD_BYTES.

    Returns:
        The chunks in order. Each has at most MAX_SEGMENTS segments and a description that fits a message's body.

    Raises:
        ConfigurationError: a name is too long, or the dtype cannot travel.
    """
    _check(tensors, dtype)
    total_numel = sum(numel for _, _, _, numel in tensors)
    limit_numel = _even_limit(total_numel, max(1, chunk_bytes // dtype.itemsize))
    specs: list[ChunkSpec] = []
    segments: list[Segment] = []
    filled_numel, description_bytes = 0, 0

    def close() -> None:
        nonlocal segments, filled_numel, description_bytes
        if segments:
            specs.append(ChunkSpec(first_key + len(specs), kind, dtype, filled_numel, tuple(segments)))
        segments, filled_numel, description_bytes = [], 0, 0

    for name, shape, strides, numel in tensors:
        start = 0
        segment_bytes = _description_bytes(name, len(shape))
        while start < numel:
            is_full = filled_numel >= limit_numel or len(segments) >= MAX_SEGMENTS
            if is_full or description_bytes + segment_bytes > MAX_DESCRIPTION_BYTES:
                close()
            taken = min(numel - start, limit_numel - filled_numel)
            segments.append(Segment(name, tuple(shape), tuple(strides), start, taken))
            start += taken
            filled_numel += taken
            description_bytes += segment_bytes
    close()
    return specs


def runs_of(spec: ChunkSpec, groups: Mapping[str, int]) -> list[list[int]]:
    """A chunk's runs as CONFIGURE wants them: [start, end, group] over its elements, one for each segment.

    Neighbours of one group stay apart, because a push leaves out whole runs, and a tensor may lack a gradient alone.

    Args:
        spec: the chunk.
        groups: tensor name -> index of its optimizer group; tensors that are not in it are not trained (group -1).
    """
    runs, start = [], 0
    for segment in spec.segments:
        end = start + segment.numel
        runs.append([start, end, groups.get(segment.name, -1)])
        start = end
    return runs


def _even_limit(total_numel: int, most_numel: int) -> int:
    """Elements per chunk: as few chunks as ``most_numel`` allows, about equally large, cut on aligned elements."""
    if most_numel <= ALIGNMENT_NUMEL:
        return most_numel
    aligned_numel = most_numel // ALIGNMENT_NUMEL * ALIGNMENT_NUMEL
    chunks = max(1, -(-total_numel // aligned_numel))
    even_numel = -(-total_numel // chunks)
    return max(ALIGNMENT_NUMEL, -(-even_numel // ALIGNMENT_NUMEL) * ALIGNMENT_NUMEL)


def _description_bytes(name: str, dimensions: int) -> int:
    """An upper bound for a segment's msgpack bytes: 9 per number, 5 per container or string head."""
    return len(name.encode()) + 5 + 9 * (2 * dimensions + 2) + 15


def _check(tensors: Sequence[TensorDescription], dtype: torch.dtype) -> None:
    if dtype not in DTYPE_NUMBERS:
        names = ", ".join(str(known).removeprefix("torch.") for known in DTYPE_NUMBERS)
        raise ConfigurationError(f"tensors of this dtype cannot travel (expected one of {names}, got {dtype})")
    for name, _, _, _ in tensors:
        if not 0 < len(name) <= MAX_NAME_CHARS:
            raise ConfigurationError(
                f"a tensor's name does not fit a message (expected 1 to {MAX_NAME_CHARS} characters,"
                f" got {len(name)}: {name[:80]!r})"
            )
