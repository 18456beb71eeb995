"""The files of one snapshot generation. Nothing that is read is used before its hash was checked.

    manifest.json        what each shard holds: its jobs, chunks and tensors' descriptions; line 1 has its hash
    shard-000.tensors    the elements of a shard's tensors, in the manifest's order, without gaps

A file is hashed (xxh3-64) in the pass that writes or reads it. What is written is the tensors' own memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import xxhash

from psengine.errors import SnapshotError
from psengine.parameter_server.server.log.disk import Disk, DiskFile
from psengine.protocol.frames import buffer_of
from psengine.protocol.messages import DTYPES

FORMAT = 2
# Written or read at once: small tensors share a write, and a piece is hashed while the processor's cache holds it.
_PIECE_BYTES = 1024 * 1024
_MANIFEST = "manifest.json"
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


# By shard, where its log goes on from a generation: the segment, and the number of that segment's first record.
LogPlaces = dict[int, tuple[int, int]]


def write_generation(disk: Disk, generation: int, shards: Sequence[Sequence[JobState]], log: LogPlaces) -> None:
    """Write all shards into an empty directory; its content is durable afterwards, its name is not.

    Raises:
        OSError: writing or an fsync failed.
    """
    described = []
    for index, jobs in enumerate(shards):
        tensors = [tensor for job in jobs for chunk in job.chunks for tensor in chunk.tensors.values()]
        digest = _write_tensors(disk, _shard_file(index), tensors)
        described.append({"xxh3_64": digest, "jobs": [_describe(job) for job in jobs]})
    places = {str(shard): place for shard, place in log.items()}
    content = {"format": FORMAT, "generation": generation, "shards": described, "log": places}
    manifest = json.dumps(content, separators=(",", ":")).encode()
    with _new_file(disk, _MANIFEST) as file:
        file.append([_first_line(manifest), manifest])
    disk.sync_names()


def read_generation(disk: Disk, generation: int) -> list[list[JobState]]:
    """Read the shards' jobs that ``write_generation`` wrote.

    Raises:
        DamagedFileError: a file is not what was written.
        OSError: a file could not be read.
    """
    shards = _read_manifest(disk, generation)["shards"]
    return [_read_shard(disk, _shard_file(index), shard) for index, shard in enumerate(shards)]


def read_log_places(disk: Disk, generation: int) -> LogPlaces:
    """Where each shard's log goes on from a generation; errors as ``read_generation``."""
    found = _read_manifest(disk, generation).get("log", {})
    return {int(shard): (segment, first) for shard, (segment, first) in found.items()}


def _read_manifest(disk: Disk, generation: int) -> dict[str, Any]:
    start, _, manifest = disk.read(_MANIFEST, 0, disk.size_bytes(_MANIFEST)).partition(b"\n")
    if start + b"\n" != _first_line(manifest):
        raise DamagedFileError(disk, _MANIFEST, "its xxh3-64 is not the one in its first line: damaged, or cut off")
    content = json.loads(manifest)
    if (content.get("format"), content.get("generation")) != (FORMAT, generation):
        raise DamagedFileError(
            disk,
            _MANIFEST,
            f"another version's, or another generation's (expected format {FORMAT}, generation {generation}, got"
            f" {content.get('format')}, {content.get('generation')})",
        )
    return dict(content)


def _write_tensors(disk: Disk, name: str, tensors: Sequence[torch.Tensor]) -> str:
    digest = xxhash.xxh3_64()
    with _new_file(disk, name) as file:
        waiting: list[memoryview] = []
        waiting_bytes = 0
        for tensor in tensors:
            for piece in _pieces(tensor.contiguous()):
                digest.update(piece)
                waiting.append(piece)
                waiting_bytes += len(piece)
                if waiting_bytes >= _PIECE_BYTES:
                    file.append(waiting)
                    waiting, waiting_bytes = [], 0
        file.append(waiting)
    return digest.hexdigest()


def _read_shard(disk: Disk, name: str, described: dict[str, Any]) -> list[JobState]:
    chunks = [chunk for job in described["jobs"] for chunk in job["chunks"]]
    specs = [(_DTYPES_BY_NAME[dtype], shape) for chunk in chunks for dtype, shape in chunk["tensors"].values()]
    tensors = iter(_read_tensors(disk, name, specs, described["xxh3_64"]))
    return [
        JobState(
            job["name"],
            job["meta"],
            [
                ChunkState(chunk["key"], chunk["meta"], {name: next(tensors) for name in chunk["tensors"]})
                for chunk in job["chunks"]
            ],
        )
        for job in described["jobs"]
    ]


def _read_tensors(
    disk: Disk, name: str, specs: Sequence[tuple[torch.dtype, list[int]]], expected: str
) -> list[torch.Tensor]:
    """Tensors with memory of their own."""
    # Before any memory is asked for.
    size_bytes, expected_bytes = disk.size_bytes(name), sum(prod(s) * d.itemsize for d, s in specs)
    if size_bytes != expected_bytes:
        raise DamagedFileError(disk, name, f"size (expected {expected_bytes} bytes, got {size_bytes})")
    tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in specs]
    digest, offset, read = xxhash.xxh3_64(), 0, memoryview(b"")
    for tensor in tensors:
        rest = buffer_of(tensor)
        while rest:
            if not read:
                read = memoryview(disk.read(name, offset, _PIECE_BYTES))
                if not read:
                    raise DamagedFileError(disk, name, "the file ended while it was being read")
                digest.update(read)
                offset += len(read)
            piece = read[: len(rest)]
            rest[: len(piece)] = piece
            rest, read = rest[len(piece) :], read[len(piece) :]
    if digest.hexdigest() != expected:
        raise DamagedFileError(disk, name, f"xxh3-64 (expected {expected}, got {digest.hexdigest()})")
    return tensors


def _describe(job: JobState) -> dict[str, Any]:
    chunks = [
        {
            "key": chunk.key,
            "meta": chunk.meta,
            "tensors": {
                name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
                for name, tensor in chunk.tensors.items()
            },
        }
        for chunk in job.chunks
    ]
    return {"name": job.name, "meta": job.meta, "chunks": chunks}


def _first_line(manifest: bytes) -> bytes:
    return json.dumps({"xxh3_64": xxhash.xxh3_64_hexdigest(manifest)}).encode() + b"\n"


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a contiguous tensor itself, in order."""
    whole = buffer_of(tensor)
    for start in range(0, len(whole), _PIECE_BYTES):
        yield whole[start : start + _PIECE_BYTES]


def _shard_file(index: int) -> str:
    return f"shard-{index:03d}.tensors"


@contextmanager
def _new_file(disk: Disk, name: str) -> Iterator[DiskFile]:
    """A file for writing that is on the disk when the context ends."""
    file = disk.create(name)
    try:
        yield file
        file.sync()
    finally:
        file.close()
