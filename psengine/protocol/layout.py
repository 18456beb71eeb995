"""Chunks: the pieces of a model's tensors that servers hold. Pure descriptions, the same on every worker of a job.

parameters   | fc1.weight                  | fc1.bias | fc2.weight      |
one flat     |______________________________________________________ ...|
chunks       |  key 0          |  key 1          |  key 2             ...|      of about equal size
segments     | fc1.weight[0:a] | fc1.weight[a:] fc1.bias fc2.weight[0:b] | ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

import torch
import xxhash
from msgspec import Meta, Struct, convert

from psengine.protocol.bounds import Name, Unsigned
from psengine.protocol.messages import DTYPE_NUMBERS, DTYPES

Sizes = Annotated[tuple[Unsigned, ...], Meta(max_length=64)]


class ChunkKind(str, Enum):
    """The role of a chunk's tensors in the job."""

    PARAMETER = "parameter"  # trained: gradients are pushed
    BUFFER = "buffer"  # running statistics: values are pushed
    CONSTANT = "constant"  # frozen parameters: never pushed
    USAGE = "usage"  # which parameters a backward used: int32, summed


class Segment(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A run of one tensor's elements inside a chunk, in the order they lie in memory.

    Attributes:
        name: the tensor's name.
        shape: the whole tensor's shape.
        strides: the whole tensor's strides in elements, which give the order of elements (channels_last differs from
            row-major). The tensor fills its memory without gaps.
        start: place of the run's first element among the tensor's elements.
        numel: number of elements in the run.
    """

    name: Name
    shape: Sizes
    strides: Sizes
    start: Unsigned
    numel: Unsigned

    def __post_init__(self) -> None:
        """Check that the run lies in the tensor, and that the tensor has no gaps."""
        if len(self.shape) != len(self.strides):
            raise ValueError(f"segment needs a stride per dimension (expected {len(self.shape)}, {self.strides})")
        total = math.prod(self.shape)
        if self.start + self.numel > total:
            raise ValueError(f"segment reaches past its tensor's end (expected at most {total} elements)")
        if total and 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)) != total:
            raise ValueError("segment must fill its memory without gaps")


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """One chunk.

    Attributes:
        key: its number, 0 <= key < number of chunks of the job.
        kind: the role of its tensors.
        dtype: of all its elements.
        numel: elements; the sum of its segments'.
        segments: what it is made of, in order.
    """

    key: int
    kind: ChunkKind
    dtype: torch.dtype
    numel: int
    segments: tuple[Segment, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its values."""
        return self.numel * self.dtype.itemsize

    def describe(self) -> str:
        """What error messages call this chunk."""
        names = [segment.name for segment in self.segments]
        shown = names if len(names) <= 3 else [names[0], f"{len(names) - 2} more", names[-1]]
        return f"chunk {self.key} ({', '.join(shown)})"

    def to_body(self) -> dict[str, Any]:
        """As it stands in REGISTER's body and CHUNKS' entries."""
        return {
            "key": self.key,
            "kind": self.kind.value,
            "dtype": DTYPE_NUMBERS[self.dtype],
            "segments": [[s.name, list(s.shape), list(s.strides), s.start, s.numel] for s in self.segments],
        }

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> ChunkSpec:
        """Inverse of ``to_body``; the codec has checked types and bounds."""
        segments = convert(body["segments"], tuple[Segment, ...])
        numel = sum(segment.numel for segment in segments)
        return cls(body["key"], ChunkKind(body["kind"]), DTYPES[body["dtype"]], numel, segments)


def job_number(name: str) -> int:
    """A job's name as it stands in the header: xxh3-64 of its UTF-8 bytes."""
    return xxhash.xxh3_64_intdigest(name.encode())


def first_difference(mine: Sequence[ChunkSpec], theirs: Sequence[ChunkSpec]) -> str:
    """The first difference of two layouts in words: the parameter and both descriptions; "" where they are equal."""
    here, there = _tensors(mine), _tensors(theirs)
    for name in here | there:
        if here.get(name) != there.get(name):
            return f"{name!r}: here {here.get(name, 'absent')}, there {there.get(name, 'absent')}"
    for own, other in zip(mine, theirs, strict=False):
        if own != other:
            return f"{own.describe()} is cut differently there, as {other.describe()}; use equal bucket sizes"
    return "" if len(mine) == len(theirs) else f"{len(mine)} chunks here, {len(theirs)} there"


def _tensors(specs: Sequence[ChunkSpec]) -> dict[str, str]:
    return {
        segment.name: f"{spec.kind.value} of shape {segment.shape}, strides {segment.strides}, {spec.dtype}"
        for spec in specs
        for segment in spec.segments
    }


def balance(sizes_bytes: Sequence[int], bins: int) -> list[int]:
    """The bin of each size, by index, so that sums are even: largest first, each to the emptiest bin.

    Deterministic: equal sizes keep their order; of equally full bins the first is taken.
    """
    filled = [0] * bins
    assigned = [0] * len(sizes_bytes)
    for index in sorted(range(len(sizes_bytes)), key=lambda i: -sizes_bytes[i]):
        target = min(range(bins), key=filled.__getitem__)
        filled[target] += sizes_bytes[index]
        assigned[index] = target
    return assigned
