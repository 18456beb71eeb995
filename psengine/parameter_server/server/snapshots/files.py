"""The files of one snapshot generation: records, as a log has them. Nothing that is read is used unchecked.

    GENERATION    each shard's jobs, chunks and tensors' descriptions; what the coordinators know; the log's places
    TENSOR        the elements of a tensor, numbered, in the order of the descriptions
    ...

What is written is the tensors' own memory. Rows of tables are in a second file of the same form. A table's chunk names
the generations whose rows come before those of its own (``earlier``), so that a generation writes what has changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from psengine.errors import SnapshotError
from psengine.parameter_server.server.log.disk import Disk, DiskFile
from psengine.parameter_server.server.log.log import Place
from psengine.parameter_server.server.log.records import MAGIC, Record, RecordFile, RecordKind, encode
from psengine.protocol.frames import buffer_of
from psengine.protocol.layout import job_number

# What the names of tensors with a table's rows begin with, or go on with behind an earlier generation and a slash.
ROWS = "rows/"


@dataclass
class ChunkState:
    """One chunk at one shard.

    Attributes:
        key: its number within the job.
        meta: numbers, texts, lists and dictionaries.
        tensors: on the CPU, by name.
    """

    key: int
    meta: dict[str, Any]
    tensors: dict[str, torch.Tensor]


@dataclass
class JobState:
    """One job at one shard: what the shard knows of the job (``meta``, as a chunk's), and its chunks there."""

    name: str
    meta: dict[str, Any]
    chunks: list[ChunkState]


@dataclass
class ServerState:
    """All that a server process holds, each shard's at one record of its log.

    Attributes:
        shards: the jobs of each shard.
        places: by shard, where its log goes on from here; empty without a log.
        coordinators: what the coordinators know, as a chunk's ``meta``.
        has_rows: whether its generation has a second file.
    """

    shards: list[list[JobState]]
    places: dict[int, Place] = field(default_factory=dict)
    coordinators: dict[str, Any] = field(default_factory=dict)
    has_rows: bool = False

    def tensors(self) -> Iterator[torch.Tensor]:
        """In the order of the file."""
        return (t for _, chunk in self.chunks() for t in chunk.tensors.values())

    def chunks(self) -> Iterator[tuple[str, ChunkState]]:
        """All, each with what its tensors' names begin with in a file of rows."""
        for shard, jobs in enumerate(self.shards):
            for job in jobs:
                yield from ((f"{shard}/{job_number(job.name)}/{chunk.key}/", chunk) for chunk in job.chunks)

    def earlier(self) -> set[int]:
        """The generations whose rows come before its own."""
        return {number for _, chunk in self.chunks() for number in chunk.meta.get("earlier", ())}

    def take_rows(self) -> ServerState:
        """What the file of rows has; they are not here any more."""
        rows = {
            place + name: chunk.tensors.pop(name)
            for place, chunk in self.chunks()
            for name in list(chunk.tensors)
            if name.startswith(ROWS)
        }
        self.has_rows = bool(rows)
        return ServerState([[JobState("", {}, [ChunkState(0, {}, rows)])]])


def write_generation(file: DiskFile, generation: int, state: ServerState) -> None:
    """Write all shards into an empty file; one with rows has the rows of ``take_rows`` in a file of their own.

    Raises:
        OSError: it could not be written.
    """
    for number, record in enumerate(records_of(state)):
        file.append(encode(record, number or generation))


def records_of(state: ServerState) -> Iterator[Record]:
    """Its description, then its tensors."""
    described = msgspec.msgpack.encode(state, enc_hook=lambda tensor: [str(tensor.dtype), list(tensor.shape)])
    yield Record(RecordKind.GENERATION, frames=[described])
    for tensor in state.tensors():
        yield Record(RecordKind.TENSOR, frames=[buffer_of(tensor.contiguous())])


def read_generation(disk: Disk, generation: int) -> ServerState:
    """Read what ``write_generation`` wrote, with the rows of earlier generations; the tensors own their memory.

    Raises:
        SnapshotError: a file is not what was written; the message names it and says why.
        OSError: it could not be read.
    """
    state = _read(disk, generation_name(generation), generation)
    for number in sorted(needed_rows(state, generation)):
        is_own, ((_, rows),) = number == generation, _read(disk, rows_name(number), number).chunks()
        for place, chunk in state.chunks():
            if is_own or number in chunk.meta.get("earlier", ()):
                begin = "" if is_own else f"{number}/"
                here = [name for name in rows.tensors if name.startswith(place)]
                chunk.tensors |= {begin + name.removeprefix(place): rows.tensors[name] for name in here}
    return state


def needed_rows(state: ServerState, generation: int) -> set[int]:
    """The generations of which this one, with this description, needs the rows."""
    return state.earlier() | ({generation} if state.has_rows else set())


def _read(disk: Disk, name: str, generation: int) -> ServerState:
    file, path = RecordFile(disk, name), f"{disk}/{name}"
    state, offset = _read_description(disk, file, generation, name)
    for number, tensor in enumerate(state.tensors(), 1):
        found = file.record(offset)
        if found is None or (found.kind, found.number) != (RecordKind.TENSOR, number):
            raise SnapshotError(f"{path}: tensor {number} at byte {offset} is damaged, or cut off")
        fill(tensor, found)
        offset += found.size_bytes
    if offset != file.size_bytes:
        raise SnapshotError(f"{path}: size (expected {offset} bytes, got {file.size_bytes})")
    return state


def read_places(disk: Disk, generation: int) -> dict[int, Place]:
    """Where each shard's log goes on from a generation; errors as ``read_generation``."""
    return _describe(disk, generation).places


def read_needed_rows(disk: Disk, generation: int) -> set[int]:
    """The generations of which one needs the rows; errors as ``read_generation``."""
    return needed_rows(_describe(disk, generation), generation)


def _describe(disk: Disk, generation: int) -> ServerState:
    name = generation_name(generation)
    return _read_description(disk, RecordFile(disk, name), generation, name)[0]


def _read_description(disk: Disk, file: RecordFile, generation: int, name: str) -> tuple[ServerState, int]:
    """The state, with tensors that have no values yet, and the offset behind it."""
    found = file.record(0)
    if found is None or (found.kind, found.number) != (RecordKind.GENERATION, generation):
        raise SnapshotError(
            f"{disk}/{name}: its beginning is damaged, cut off, or another version's or"
            f" generation's (expected a record {MAGIC!r} with the number {generation})"
        )
    return state_of(found), found.size_bytes


def state_of(described: Record) -> ServerState:
    """What a GENERATION record describes, with tensors that have no values yet."""
    return msgspec.msgpack.decode(described.frames[0], type=ServerState, dec_hook=_make_tensor)


def fill(tensor: torch.Tensor, record: Record) -> None:
    """Write the elements of a TENSOR record; ValueError where they are not as many."""
    for elements in record.frames:  # none of a tensor without elements
        buffer_of(tensor)[:] = elements


def _make_tensor(kind: type, described: Any) -> torch.Tensor:
    """An empty one with this dtype and shape."""
    dtype, shape = described
    return torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))


def generation_name(generation: int) -> str:
    """The name of a generation's file."""
    return f"generation-{generation:012d}"


def rows_name(generation: int) -> str:
    """The name of the file with a generation's rows."""
    return f"rows-{generation:012d}"
