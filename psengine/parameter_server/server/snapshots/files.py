"""The files of one snapshot generation. Nothing that is read is used before its hash was checked.

    manifest.json        what each shard holds: its jobs, chunks and tensors' descriptions; line 1 has its hash
    shard-000.tensors    the elements of a shard's tensors, in the manifest's order, without gaps

A file is hashed (xxh3-64) in the pass that writes or reads it, straight from and into the tensors' memory. The
descriptor that wrote a file also fsyncs it: Linux reports a failed write-back once, to the descriptors open then.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from psengine.errors import SnapshotError
from psengine.protocol.frames import buffer_of
from psengine.protocol.messages import DTYPES

FORMAT = 2
# Small tensors share a write; a larger piece bypasses the buffer, and is hashed while the processor's cache holds it.
_BUFFER_BYTES = 64 * 1024
_PIECE_BYTES = 1024 * 1024
_MANIFEST = "manifest.json"
_DTYPES_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


class DamagedFileError(SnapshotError):
    """A file of a snapshot is not what was written; the message names it and says why."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")


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


def write_generation(directory: Path, generation: int, shards: Sequence[Sequence[JobState]], log: LogPlaces) -> None:
    """Write all shards into ``directory``, which is created; its content is durable afterwards, its name is not.

    Raises:
        OSError: writing or an fsync failed.
    """
    directory.mkdir()
    described = []
    for index, jobs in enumerate(shards):
        tensors = [tensor for job in jobs for chunk in job.chunks for tensor in chunk.tensors.values()]
        digest = _write_tensors(_shard_path(directory, index), tensors)
        described.append({"xxh3_64": digest, "jobs": [_describe(job) for job in jobs]})
    places = {str(shard): place for shard, place in log.items()}
    content = {"format": FORMAT, "generation": generation, "shards": described, "log": places}
    manifest = json.dumps(content, separators=(",", ":")).encode()
    with _new_file(directory / _MANIFEST) as file:
        file.write(_first_line(manifest) + manifest)
    flush_directory(directory)


def read_generation(directory: Path, generation: int) -> list[list[JobState]]:
    """Read the shards' jobs that ``write_generation`` wrote.

    Raises:
        DamagedFileError: a file is not what was written.
        OSError: a file could not be read.
    """
    shards = _read_manifest(directory, generation)["shards"]
    return [_read_shard(_shard_path(directory, index), shard) for index, shard in enumerate(shards)]


def read_log_places(directory: Path, generation: int) -> LogPlaces:
    """Where each shard's log goes on from a generation; errors as ``read_generation``."""
    found = _read_manifest(directory, generation).get("log", {})
    return {int(shard): (segment, first) for shard, (segment, first) in found.items()}


def _read_manifest(directory: Path, generation: int) -> dict[str, Any]:
    path = directory / _MANIFEST
    start, _, manifest = path.read_bytes().partition(b"\n")
    if start + b"\n" != _first_line(manifest):
        raise DamagedFileError(path, "its xxh3-64 is not the one in its first line: damaged, or cut off")
    content = json.loads(manifest)
    if (content.get("format"), content.get("generation")) != (FORMAT, generation):
        raise DamagedFileError(
            path,
            f"another version's, or another generation's (expected format {FORMAT}, generation {generation}, got"
            f" {content.get('format')}, {content.get('generation')})",
        )
    return dict(content)


def flush_directory(path: Path) -> None:
    """Make the names in a directory durable.

    Raises:
        OSError: the fsync failed.
    """
    with _named(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_tensors(path: Path, tensors: Sequence[torch.Tensor]) -> str:
    digest = xxhash.xxh3_64()
    with _new_file(path) as file:
        for tensor in tensors:
            for piece in _pieces(tensor.contiguous()):
                digest.update(piece)
                file.write(piece)
    return digest.hexdigest()


def _read_shard(path: Path, described: dict[str, Any]) -> list[JobState]:
    chunks = [chunk for job in described["jobs"] for chunk in job["chunks"]]
    specs = [(_DTYPES_BY_NAME[dtype], shape) for chunk in chunks for dtype, shape in chunk["tensors"].values()]
    tensors = iter(_read_tensors(path, specs, described["xxh3_64"]))
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


def _read_tensors(path: Path, specs: Sequence[tuple[torch.dtype, list[int]]], expected: str) -> list[torch.Tensor]:
    """Tensors with memory of their own."""
    digest = xxhash.xxh3_64()
    with io.BufferedReader(io.FileIO(path), _BUFFER_BYTES) as file:
        # Before any memory is asked for.
        size_bytes, expected_bytes = os.fstat(file.fileno()).st_size, sum(prod(s) * d.itemsize for d, s in specs)
        if size_bytes != expected_bytes:
            raise DamagedFileError(path, f"size (expected {expected_bytes} bytes, got {size_bytes})")
        tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in specs]
        for tensor in tensors:
            for piece in _pieces(tensor):
                if file.readinto(piece) != len(piece):
                    raise DamagedFileError(path, "the file ended while it was being read")
                digest.update(piece)
    if digest.hexdigest() != expected:
        raise DamagedFileError(path, f"xxh3-64 (expected {expected}, got {digest.hexdigest()})")
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
    """The bytes of a contiguous tensor itself, in order; writable."""
    whole = buffer_of(tensor)
    for start in range(0, len(whole), _PIECE_BYTES):
        yield whole[start : start + _PIECE_BYTES]


def _shard_path(directory: Path, index: int) -> Path:
    return directory / f"shard-{index:03d}.tensors"


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A file for writing that is on the disk when the context ends."""
    with _named(path), open(path, "xb", buffering=_BUFFER_BYTES) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the file in the operating system's errors about a descriptor."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
