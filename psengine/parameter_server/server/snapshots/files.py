"""The file of one snapshot generation. Nothing that is read is used before its hash was checked.

    line 1      the size of the manifest, and its hash
    manifest    JSON: each shard's jobs, chunks and tensors' descriptions; what the coordinators know; the log's places
    elements    of all tensors, in the manifest's order, without gaps
    8 bytes     the hash of the elements

A part is hashed (xxh3-64) in the pass that writes or reads it. What is written is the tensors' own memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import xxhash

from psengine.errors import SnapshotError
from psengine.parameter_server.server.log.disk import Disk, DiskFile
from psengine.parameter_server.server.log.log import Place
from psengine.protocol.frames import buffer_of
from psengine.protocol.messages import DTYPES

FORMAT = 3
_MAX_LINE_BYTES = 128
_DTYPES_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


class DamagedFileError(SnapshotError):
    """A file of a snapshot is not what was written; the message names it and says why."""

    def __init__(self, disk: Disk, name: str, reason: str) -> None:
        super().__init__(f"{disk}/{name}: {reason}")


@dataclass
class ChunkState:
    """One chunk at one shard.

    Attributes:
        key: its number within the job.
        meta: JSON-able; dictionaries have string keys.
        tensors: on the CPU, by name.
    """

    key: int
    meta: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def size_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


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
        coordinators: what the coordinators know, JSON-able; None where nothing is known.
    """

    shards: list[list[JobState]]
    places: dict[int, Place] = field(default_factory=dict)
    coordinators: Any = None

    def tensors(self) -> Iterator[torch.Tensor]:
        """In the order of the file."""
        return (t for jobs in self.shards for job in jobs for chunk in job.chunks for t in chunk.tensors.values())


def write_generation(file: DiskFile, generation: int, state: ServerState) -> None:
    """Write all shards into an empty file, which is durable afterwards; its name is not.

    Raises:
        OSError: writing or an fsync failed.
    """
    shards = [[_describe(job) for job in jobs] for jobs in state.shards]
    content = {"format": FORMAT, "generation": generation, "shards": shards, "log": state.places}
    manifest = json.dumps(content | {"coordinators": state.coordinators}, separators=(",", ":")).encode()
    file.append([_first_line(manifest), manifest])
    digest = xxhash.xxh3_64()
    for elements in map(buffer_of, map(torch.Tensor.contiguous, state.tensors())):
        digest.update(elements)
        file.append([elements])
    file.append([digest.digest()])
    file.sync()


def read_generation(disk: Disk, name: str, generation: int) -> ServerState:
    """Read what ``write_generation`` wrote; the tensors own their memory.

    Raises:
        DamagedFileError: the file is not what was written.
        OSError: it could not be read.
    """
    content, offset = _read_manifest(disk, name, generation)
    chunks = [chunk for jobs in content["shards"] for job in jobs for chunk in job["chunks"]]
    specs = [(_DTYPES_BY_NAME[dtype], shape) for chunk in chunks for dtype, shape in chunk["tensors"].values()]
    tensors = iter(_read_tensors(disk, name, offset, specs))

    def chunk_of(chunk: dict[str, Any]) -> ChunkState:
        return ChunkState(chunk["key"], chunk["meta"], {name: next(tensors) for name in chunk["tensors"]})

    shards = [
        [JobState(job["name"], job["meta"], [chunk_of(chunk) for chunk in job["chunks"]]) for job in jobs]
        for jobs in content["shards"]
    ]
    return ServerState(shards, _places_in(content), content["coordinators"])


def read_places(disk: Disk, name: str, generation: int) -> dict[int, Place]:
    """Where each shard's log goes on from a generation; errors as ``read_generation``."""
    return _places_in(_read_manifest(disk, name, generation)[0])


def _places_in(content: dict[str, Any]) -> dict[int, Place]:
    return {int(shard): Place(*place) for shard, place in content["log"].items()}


def _read_manifest(disk: Disk, name: str, generation: int) -> tuple[dict[str, Any], int]:
    """The manifest, and the offset behind it."""
    line, end, _ = disk.read(name, 0, _MAX_LINE_BYTES).partition(b"\n")
    try:
        size_bytes = int(json.loads(line)["bytes"])
    except (ValueError, LookupError, TypeError):
        raise DamagedFileError(disk, name, "its first line is damaged, or another version's, or cut off") from None
    manifest = disk.read(name, len(line + end), size_bytes)
    if line + end != _first_line(manifest):
        raise DamagedFileError(disk, name, "its xxh3-64 is not the one in its first line: damaged, or cut off")
    content = json.loads(manifest)
    expected = {"format": FORMAT, "generation": generation}
    if got := {key: content.get(key) for key, value in expected.items() if content.get(key) != value}:
        text = f"another version's, or another generation's (expected {expected}, got {got})"
        raise DamagedFileError(disk, name, text)
    return content, len(line + end) + size_bytes


def _read_tensors(
    disk: Disk, name: str, offset: int, specs: Sequence[tuple[torch.dtype, list[int]]]
) -> list[torch.Tensor]:
    """Tensors with memory of their own."""
    digest = xxhash.xxh3_64()
    # Before any memory is asked for.
    expected_bytes = offset + sum(prod(shape) * dtype.itemsize for dtype, shape in specs) + digest.digest_size
    if (size_bytes := disk.size_bytes(name)) != expected_bytes:
        raise DamagedFileError(disk, name, f"size (expected {expected_bytes} bytes, got {size_bytes})")
    tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in specs]
    for elements in map(buffer_of, tensors):
        read = disk.read(name, offset, len(elements))
        if len(read) != len(elements):
            raise DamagedFileError(disk, name, "the file ended while it was being read")
        digest.update(read)
        if read:  # a tensor without elements has no memory to write to
            elements[:] = read
        offset += len(read)
    if disk.read(name, offset, digest.digest_size) != digest.digest():
        raise DamagedFileError(disk, name, "the xxh3-64 of its tensors is not the one at its end: damaged")
    return tensors


def _describe(job: JobState) -> dict[str, Any]:
    def described(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        return {name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors}

    chunks = [{"key": c.key, "meta": c.meta, "tensors": described(c.tensors.items())} for c in job.chunks]
    return {"name": job.name, "meta": job.meta, "chunks": chunks}


def _first_line(manifest: bytes) -> bytes:
    return json.dumps({"bytes": len(manifest), "xxh3_64": xxhash.xxh3_64_hexdigest(manifest)}).encode() + b"\n"
