"""The file of one snapshot generation: records, as a log has them. Nothing that is read is used unchecked.

    GENERATION    each shard's jobs, chunks and tensors' descriptions; what the coordinators know; the log's places
    TENSOR        the elements of a tensor, numbered, in the order of the descriptions
    ...

What is written is the tensors' own memory.
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
    """

    shards: list[list[JobState]]
    places: dict[int, Place] = field(default_factory=dict)
    coordinators: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> Iterator[torch.Tensor]:
        """In the order of the file."""
        return (t for jobs in self.shards for job in jobs for chunk in job.chunks for t in chunk.tensors.values())


def write_generation(file: DiskFile, generation: int, state: ServerState) -> None:
    """Write all shards into an empty file.

    Raises:
        OSError: it could not be written.
    """
    described = msgspec.msgpack.encode(state, enc_hook=lambda tensor: [str(tensor.dtype), list(tensor.shape)])
    file.append(encode(Record(RecordKind.GENERATION, frames=[described]), generation))
    for number, tensor in enumerate(state.tensors(), 1):
        elements = buffer_of(tensor.contiguous())
        file.append(encode(Record(RecordKind.TENSOR, frames=[elements]), number))


def read_generation(disk: Disk, generation: int) -> ServerState:
    """Read what ``write_generation`` wrote; the tensors own their memory.

    Raises:
        SnapshotError: the file is not what was written; the message names it and says why.
        OSError: it could not be read.
    """
    file, path = RecordFile(disk, generation_name(generation)), f"{disk}/{generation_name(generation)}"
    state, offset = _read_description(disk, file, generation)
    for number, tensor in enumerate(state.tensors(), 1):
        found = file.record(offset)
        if found is None or (found.kind, found.number) != (RecordKind.TENSOR, number):
            raise SnapshotError(f"{path}: tensor {number} at byte {offset} is damaged, or cut off")
        for elements in found.frames:  # none of a tensor without elements
            buffer_of(tensor)[:] = elements
        offset += found.size_bytes
    if offset != file.size_bytes:
        raise SnapshotError(f"{path}: size (expected {offset} bytes, got {file.size_bytes})")
    return state


def read_places(disk: Disk, generation: int) -> dict[int, Place]:
    """Where each shard's log goes on from a generation; errors as ``read_generation``."""
    return _read_description(disk, RecordFile(disk, generation_name(generation)), generation)[0].places


def _read_description(disk: Disk, file: RecordFile, generation: int) -> tuple[ServerState, int]:
    """The state, with tensors that have no values yet, and the offset behind it."""
    found = file.record(0)
    if found is None or (found.kind, found.number) != (RecordKind.GENERATION, generation):
        raise SnapshotError(
            f"{disk}/{generation_name(generation)}: its beginning is damaged, cut off, or another version's or"
            f" generation's (expected a record {MAGIC!r} with the number {generation})"
        )
    return msgspec.msgpack.decode(found.frames[0], type=ServerState, dec_hook=_make_tensor), found.size_bytes


def _make_tensor(kind: type, described: Any) -> torch.Tensor:
    """An empty one with this dtype and shape."""
    dtype, shape = described
    return torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))


def generation_name(generation: int) -> str:
    """The name of a generation's file."""
    return f"generation-{generation:012d}"
