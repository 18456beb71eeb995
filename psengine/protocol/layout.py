"""Chunks: the pieces of a model's tensors that servers hold. Pure descriptions, the same on every worker of a job.

parameters   | fc1.weight                  | fc1.bias | fc2.weight      |
one flat     |______________________________________________________ ...|
chunks       |  key 0          |  key 1          |  key 2             ...|      of about equal size
segments     | fc1.weight[0:a] | fc1.weight[a:] fc1.bias fc2.weight[0:b] | ...
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

import torch
import xxhash
from msgspec import DecodeError, Meta, Struct, convert, field, json, to_builtins
from msgspec.structs import asdict, replace

from psengine.errors import ProtocolError
from psengine.protocol.bounds import Name, Positive, Printable, Unsigned, one_of
from psengine.protocol.messages import DTYPE_NUMBERS, DTYPES

Sizes = Annotated[tuple[Unsigned, ...], Meta(max_length=64)]
# Numbers that are used as float32.
Single = Annotated[float, Meta(ge=0.0, le=1e30)]
# How a server steps the rows of a table.
TABLE_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
ID_BYTES = 8
MAX_TABLE_DIM = 65_536
# The constant, a uint8 tensor, that says what a model's state_dict has beside the chunks' tensors: ``OtherNames``.
OTHER_NAMES = "psengine/other names"
ONE_ORDER = "Fix: register parameters and buffers in one order on every worker; a set has none"


class ChunkKind(str, Enum):
    """The role of a chunk's tensors in the job."""

    PARAMETER = "parameter"  # trained: gradients are pushed
    BUFFER = "buffer"  # running statistics: values are pushed
    CONSTANT = "constant"  # frozen parameters: never pushed
    USAGE = "usage"  # summed: which parameters a backward used, int32; losses of closures, float64
    ACCOUNT = "account"  # what a replica says of itself; comes back as the lowest rank's
    TABLE = "table"  # part of a table of rows: gradients of rows are pushed

    @property
    def is_trained(self) -> bool:
        """Whether gradients are pushed for it."""
        return self in (ChunkKind.PARAMETER, ChunkKind.TABLE)


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


class TableSpec(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One part of a table, whose rows are float32; parts have the rows that a hash of their ids gives them.

    Attributes:
        name: the table's.
        rows: of the whole table, declared; ids are 0 to ``rows`` - 1.
        dim: elements of a row.
        part: 0 <= part < parts.
        parts: how many the table has.
        seed: of the first values, and of the hash.
        std: standard deviation of the first values.
        optimizer: one of ``TABLE_OPTIMIZERS``.
        eps: of Adagrad.
        max_rows: most rows that the whole table may have at servers, the part its share of it; 0: no bound.
        padding: the row that is zeros for workers, and is not pushed; -1: none.
    """

    name: Printable
    rows: Positive
    dim: Annotated[int, Meta(ge=1, le=MAX_TABLE_DIM)]
    part: Unsigned
    parts: Annotated[int, Meta(ge=1, le=65_536)]
    seed: Unsigned
    std: Single
    optimizer: Annotated[str, one_of(*TABLE_OPTIMIZERS)]
    eps: Single
    max_rows: Unsigned
    padding: Annotated[int, Meta(ge=-1)]

    def __post_init__(self) -> None:
        """Check that the part is one of the parts."""
        if self.part >= self.parts:
            raise ValueError(f"part must be below parts (expected less than {self.parts}, got {self.part})")

    @property
    def number(self) -> int:
        """What tells its first values from those of other tables of the same seed."""
        return job_number(self.name) >> 1

    @property
    def part_rows(self) -> int:
        """Most rows that the part may have; 0: no bound."""
        return -(-self.max_rows // self.parts)

    def describe(self) -> str:
        """What all parts of all workers must have alike, for error messages."""
        shown = {name: value for name, value in asdict(self).items() if name not in ("name", "part")}
        return "table of " + ", ".join(f"{name}={value}" for name, value in shown.items())


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """One chunk.

    Attributes:
        key: its number, 0 <= key < number of chunks of the job.
        kind: the role of its tensors.
        dtype: of all its elements.
        numel: elements; the sum of its segments', or those of a table's row.
        segments: what it is made of, in order; none of a table.
        table: the part that it is, of kind "table".
    """

    key: int
    kind: ChunkKind
    dtype: torch.dtype
    numel: int
    segments: tuple[Segment, ...]
    table: TableSpec | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of its values."""
        return self.numel * self.dtype.itemsize

    def describe(self) -> str:
        """What error messages call this chunk."""
        if self.table is not None:
            return f"table {self.table.name!r}, part {self.table.part} of {self.table.parts}"
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
            **({} if self.table is None else {"table": list(to_builtins(self.table))}),
        }

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> ChunkSpec:
        """Inverse of ``to_body``; the codec has checked types and bounds."""
        segments = convert(body["segments"], tuple[Segment, ...])
        table = convert(body["table"], TableSpec) if "table" in body else None
        numel = sum(segment.numel for segment in segments) if table is None else table.dim
        return cls(body["key"], ChunkKind(body["kind"]), DTYPES[body["dtype"]], numel, segments, table)


class OtherNames(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a model's ``state_dict`` has beside the tensors that travel, and what it has not.

    Attributes:
        tied: each further name of a tensor to the name that it travels under.
        empty: tensors without elements: the number of the dtype, and the shape.
        unsaved: names of buffers that are not persistent.
    """

    tied: dict[Name, Name] = field(default_factory=dict)
    empty: dict[Name, tuple[int, Sizes]] = field(default_factory=dict)
    unsaved: frozenset[Name] = frozenset()

    def __post_init__(self) -> None:
        """Check that what is empty has no elements."""
        for name, (dtype, shape) in self.empty.items():
            if dtype not in DTYPES or 0 not in shape:
                raise ValueError(f"{name!r} should have a known dtype and no elements")

    def with_empty(self, tensors: Mapping[str, torch.Tensor]) -> OtherNames:
        """The same, with those of these tensors that have no elements."""
        empty = {name: one for name, one in tensors.items() if not one.numel() and one.dtype in DTYPE_NUMBERS}
        described = {name: (DTYPE_NUMBERS[one.dtype], tuple(one.shape)) for name, one in empty.items()}
        return replace(self, empty=described)

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """As it travels: one tensor by its name, or none where the chunks say all."""
        written = bytearray(json.encode(self))
        return {OTHER_NAMES: torch.frombuffer(written, dtype=torch.uint8)} if len(written) > len("{}") else {}

    @classmethod
    def take(cls, tensors: dict[str, torch.Tensor]) -> OtherNames:
        """Read it, and remove it from ``tensors``.

        Raises:
            ProtocolError: it is not what ``to_tensors`` makes.
        """
        written = tensors.pop(OTHER_NAMES, None)
        try:
            return cls() if written is None else json.decode(bytes(written.numpy()), type=cls)
        except DecodeError as error:
            raise ProtocolError(f"the constant {OTHER_NAMES!r} of this job is not understood: {error}") from None

    def complete(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's ``state_dict``, of the chunks' ``tensors``."""
        empty = {name: torch.empty(shape, dtype=DTYPES[dtype]) for name, (dtype, shape) in self.empty.items()}
        whole = {**tensors, **empty}
        whole |= {name: whole[of] for name, of in self.tied.items() if of in whole}
        return {name: tensor for name, tensor in whole.items() if name not in self.unsaved}


def job_number(name: str) -> int:
    """A job's name as it stands in the header: xxh3-64 of its UTF-8 bytes."""
    return xxhash.xxh3_64_intdigest(name.encode())


def first_difference(mine: Sequence[ChunkSpec], theirs: Sequence[ChunkSpec]) -> str:
    """The first difference of two layouts in words: the parameter and both descriptions; "" where they are equal."""
    here, there = _tensors(mine), _tensors(theirs)
    for name in here | there:
        if here.get(name) != there.get(name):
            return f"{name!r}: here {here.get(name, 'absent')}, there {there.get(name, 'absent')}"
    for own_name, other_name in zip(_order(mine), _order(theirs), strict=True):
        if own_name != other_name:
            return f"{own_name!r} here stands in the place of {other_name!r} there. {ONE_ORDER}"
    for own, other in zip(mine, theirs, strict=False):
        if own != other:
            return f"{own.describe()} is cut differently there, as {other.describe()}; use equal bucket sizes"
    return "" if len(mine) == len(theirs) else f"{len(mine)} chunks here, {len(theirs)} there"


def _order(specs: Sequence[ChunkSpec]) -> list[str]:
    """Names as tensors were registered; those of one dtype together, because sizes of buckets place dtypes."""
    by_dtype = sorted(specs, key=lambda spec: str(spec.dtype))
    return list(dict.fromkeys(segment.name for spec in by_dtype for segment in spec.segments))


def _tensors(specs: Sequence[ChunkSpec]) -> dict[str, str]:
    tensors = {
        segment.name: f"{spec.kind.value} of shape {segment.shape}, strides {segment.strides}, {spec.dtype}"
        for spec in specs
        for segment in spec.segments
    }
    return tensors | {spec.table.name: spec.table.describe() for spec in specs if spec.table is not None}


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
