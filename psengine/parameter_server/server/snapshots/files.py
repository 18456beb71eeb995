"""What is in one generation of a snapshot. Nothing that is read is believed before it was checked.

A shard's tensors are a safetensors file whose header follows from the tensors' descriptions alone. The manifest keeps
these, so reading compares the header byte by byte and never interprets it. The safetensors package is not used:

* Linux reports a failed write-back once, to the descriptors open at that moment. What fsyncs must be what wrote.
* A file's hash is computed on the way to the disk and on the way back, in one pass, straight from and into the
  tensors' memory. ``safetensors.torch.load_file`` maps the file: a disk error later would kill the server.

The manifest is JSON: ``{"xxh3_64": "<hash of the next value's bytes>", "manifest": {...}}``.

One file above 400 lines: what is written and how it is checked when it is read stand side by side.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
import xxhash

from psengine.errors import SnapshotError
from psengine.protocol.frames import buffer_of
from psengine.protocol.messages import DTYPES

FORMAT = 1
MAX_MANIFEST_BYTES = 256 * 1024 * 1024
MAX_META_DEPTH = 32
MAX_DIMENSIONS = 64
_MAX_TENSOR_BYTES = 2**62
# Small tensors share a write; larger pieces go past the buffer, each hashed while it is in the processor's cache.
_BUFFER_BYTES = 64 * 1024
_PIECE_BYTES = 1024 * 1024
_MANIFEST = "manifest.json"

# torch's dtype -> how safetensors calls it. Complex numbers are stored as pairs: safetensors has no complex128.
_STORED_AS = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "F32",
    torch.complex128: "F64",
}
_DTYPES_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}

T = TypeVar("T")


class DamagedFileError(SnapshotError):
    """A file of a snapshot is not what was written; the message names it and says how."""

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
        return sum(tensor.numel() * tensor.itemsize for tensor in self.tensors.values())


@dataclass
class JobState:
    """One job at one shard: what the job knows there (``meta``, as a chunk's), and the chunks that live there."""

    name: str
    meta: dict[str, Any]
    chunks: list[ChunkState]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What the manifest says of a tensor; it may be of any layout in memory and is stored row-major."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize

    def to_json(self) -> list[Any]:
        """As it stands in the manifest."""
        return [str(self.dtype).removeprefix("torch."), list(self.shape)]

    @classmethod
    def from_json(cls, value: Any) -> TensorSpec:
        """Inverse of ``to_json``.

        Raises:
            ValueError: ``value`` describes no tensor.
        """
        if not (isinstance(value, list) and len(value) == 2 and isinstance(value[1], list)):
            raise ValueError(f"a tensor is [dtype, shape] (got {str(value)[:100]})")
        name, shape = value
        if not isinstance(name, str) or name not in _DTYPES_BY_NAME:
            raise ValueError(f"unknown dtype (expected one of {', '.join(_DTYPES_BY_NAME)}, got {str(name)[:100]})")
        dtype = _DTYPES_BY_NAME[name]
        if len(shape) > MAX_DIMENSIONS or not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError(f"not the shape of a tensor: {str(shape)[:100]}")
        # Also of an empty tensor, whose other lengths torch multiplies to strides.
        if prod(max(length, 1) for length in shape) * dtype.itemsize > _MAX_TENSOR_BYTES:
            raise ValueError(f"no tensor is this large: {str(shape)[:100]}")
        return cls(dtype, tuple(shape))


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What the manifest says of a file: its size, and xxh3-64 of all its bytes as 16 hexadecimal digits."""

    size_bytes: int
    xxh3_64: str


def write_tensor_file(path: Path, tensors: Sequence[torch.Tensor]) -> FileRecord:
    """Write a new safetensors file, its tensors named "0", "1", ... as they stand in ``tensors``, and fsync it.

    Raises:
        OSError: the file exists already, or writing or the fsync failed.
    """
    specs = [_spec(tensor) for tensor in tensors]
    header = _header(specs)
    digest = xxhash.xxh3_64(header)
    with _new_file(path) as file:
        file.write(header)
        for index in _file_order(specs):
            # A copy only where memory does not hold the elements as they are stored; of one tensor at a time.
            values = tensors[index].detach().resolve_conj().resolve_neg().contiguous()
            for piece in _pieces(values):
                digest.update(piece)
                file.write(piece)
    return FileRecord(_file_size_bytes(specs, header), digest.hexdigest())


def read_tensor_file(path: Path, specs: Sequence[TensorSpec], record: FileRecord) -> list[torch.Tensor]:
    """Read what ``write_tensor_file`` wrote; every tensor has its own memory.

    Raises:
        DamagedFileError: it is not what was written.
        OSError: it could not be read.
    """
    header = _header(specs)
    digest = xxhash.xxh3_64(header)
    with io.BufferedReader(io.FileIO(path), _BUFFER_BYTES) as file:
        # Before any memory is asked for: the manifest, the descriptions and the disk agree how much there is.
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes != record.size_bytes:
            raise DamagedFileError(path, f"size (expected {record.size_bytes} bytes, got {size_bytes})")
        described_bytes = _file_size_bytes(specs, header)
        if size_bytes != described_bytes:
            raise DamagedFileError(path, f"size (expected {described_bytes} for its tensors, got {size_bytes})")
        if file.read(len(header)) != header:
            raise DamagedFileError(path, "the header does not describe the manifest's tensors")
        tensors = [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs]
        for index in _file_order(specs):
            for piece in _pieces(tensors[index]):
                if file.readinto(piece) != len(piece):
                    raise DamagedFileError(path, "the file ended while it was being read")
                digest.update(piece)
    if digest.hexdigest() != record.xxh3_64:
        raise DamagedFileError(path, f"xxh3-64 (expected {record.xxh3_64}, got {digest.hexdigest()})")
    return tensors


def write_manifest(path: Path, content: dict[str, Any]) -> None:
    """Write a new manifest and fsync it.

    Raises:
        SnapshotError: it would be too large to be read again.
        OSError: the file exists already, or writing or the fsync failed.
    """
    manifest = json.dumps(content, separators=(",", ":")).encode()
    whole = _manifest_start(xxhash.xxh3_64_hexdigest(manifest)) + manifest + b"}\n"
    if len(whole) > MAX_MANIFEST_BYTES:
        raise SnapshotError(f"a snapshot's manifest is at most {MAX_MANIFEST_BYTES} bytes (got {len(whole)})")
    with _new_file(path) as file:
        file.write(whole)


def read_manifest(path: Path) -> dict[str, Any]:
    """Read what ``write_manifest`` wrote; its bytes are proven, its fields are not.

    Raises:
        DamagedFileError: it is not what was written.
        OSError: it could not be read.
    """
    with open(path, "rb") as file:
        whole = file.read(MAX_MANIFEST_BYTES + 1)
    if len(whole) > MAX_MANIFEST_BYTES:
        raise DamagedFileError(path, f"size (expected at most {MAX_MANIFEST_BYTES} bytes)")
    start_bytes = len(_manifest_start("0" * 16))
    manifest = whole[start_bytes:-2]
    digest = xxhash.xxh3_64_hexdigest(manifest)
    if whole[:start_bytes] != _manifest_start(digest) or whole[-2:] != b"}\n":
        raise DamagedFileError(path, f"xxh3-64 (got {digest}, which is not what its first line says) or a cut-off file")
    try:
        content = json.loads(manifest)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(path, f"not JSON: {error}") from error
    if not isinstance(content, dict):
        raise DamagedFileError(path, f"a manifest is a JSON object (got {type(content).__name__})")
    return content


def check_meta(value: Any, depth: int = 1) -> None:
    """Check that ``value`` comes back from JSON as it was (tuples as lists) and is not absurdly deep.

    Raises:
        ValueError: it would not, or is; JSON would silently turn an integer key into a string.
    """
    if depth > MAX_META_DEPTH:
        raise ValueError(f"nested too deeply (expected at most {MAX_META_DEPTH} levels)")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"keys are strings (got {key!r})")
            check_meta(inner, depth + 1)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            check_meta(inner, depth + 1)
    elif value is not None and not isinstance(value, (str, int, float)):
        raise ValueError(f"values are JSON's (got {type(value).__name__})")


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


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A file for writing that is on the disk when the context ends."""
    with _named(path), open(path, "xb", buffering=_BUFFER_BYTES) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """The operating system's errors about a descriptor do not say which file it is."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _manifest_start(digest: str) -> bytes:
    return f'{{"xxh3_64": "{digest}", "manifest":\n'.encode()


def _file_order(specs: Sequence[TensorSpec]) -> list[int]:
    """Larger elements first, so that each tensor lies aligned."""
    return sorted(range(len(specs)), key=lambda index: -specs[index].dtype.itemsize)


def _header(specs: Sequence[TensorSpec]) -> bytes:
    entries = {}
    offset = 0
    for index in _file_order(specs):
        spec = specs[index]
        entries[str(index)] = {
            "dtype": _STORED_AS[spec.dtype],
            "shape": [*spec.shape, 2] if spec.dtype.is_complex else list(spec.shape),
            "data_offsets": [offset, offset + spec.size_bytes],
        }
        offset += spec.size_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _file_size_bytes(specs: Iterable[TensorSpec], header: bytes) -> int:
    return len(header) + sum(spec.size_bytes for spec in specs)


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A contiguous tensor's own bytes, in order; writable."""
    whole = buffer_of(tensor)
    for start in range(0, len(whole), _PIECE_BYTES):
        yield whole[start : start + _PIECE_BYTES]


def check_states(shards: Sequence[Sequence[JobState]]) -> None:
    """Check that everything would come back as it is.

    Raises:
        SnapshotError: a chunk's tensors or a meta would not; the message names it.
    """
    for job in (job for jobs in shards for job in jobs):
        where = f"job {job.name!r}"
        try:
            check_meta(job.meta)
            for chunk in job.chunks:
                where = f"job {job.name!r}, chunk {chunk.key}"
                check_meta(chunk.meta)
                for name, tensor in chunk.tensors.items():
                    TensorSpec.from_json(_spec(tensor).to_json())
                    if tensor.device.type != "cpu":
                        raise ValueError(f"tensors are on the CPU (got {name!r} on {tensor.device})")
        except ValueError as error:
            raise SnapshotError(f"{where} cannot be kept in a snapshot: {error}") from error


def write_generation(directory: Path, generation: int, shards: Sequence[Sequence[JobState]]) -> None:
    """Write all shards into ``directory``, which is created; its content is durable afterwards, its name is not.

    Raises:
        SnapshotError: the manifest would be too large to be read again.
        OSError: writing or an fsync failed.
    """
    directory.mkdir()
    entries = []
    for index, jobs in enumerate(shards):
        record = write_tensor_file(_shard_path(directory, index), _tensors(jobs))
        described = [_describe(job) for job in jobs]
        entries.append({"size_bytes": record.size_bytes, "xxh3_64": record.xxh3_64, "jobs": described})
    written_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    content = {"format": FORMAT, "generation": generation, "written_at": written_at, "shards": entries}
    write_manifest(directory / _MANIFEST, content)
    flush_directory(directory)


def read_generation(directory: Path, generation: int) -> tuple[str, list[list[JobState]]]:
    """Read what ``write_generation`` wrote: when that was, and the shards' jobs.

    Raises:
        DamagedFileError: a file is not what was written.
        OSError: a file could not be read.
    """
    path = directory / _MANIFEST
    manifest = read_manifest(path)
    try:
        if manifest.get("format") != FORMAT:
            raise ValueError(f"unknown format (expected {FORMAT}, got {str(manifest.get('format'))[:100]})")
        if _field(manifest, "generation", int) != generation:
            raise ValueError(f"another generation's manifest (expected {generation}, got {manifest['generation']})")
        written_at = _field(manifest, "written_at", str)
        entries = [_parse_shard(entry) for entry in _field(manifest, "shards", list)]
    except ValueError as error:
        raise DamagedFileError(path, str(error)) from error
    for index, (record, specs, jobs) in enumerate(entries):
        tensors = iter(read_tensor_file(_shard_path(directory, index), specs, record))
        for chunk in (chunk for job in jobs for chunk in job.chunks):
            chunk.tensors = {name: next(tensors) for name in chunk.tensors}
    return written_at, [jobs for _, _, jobs in entries]


def _shard_path(directory: Path, index: int) -> Path:
    return directory / f"shard-{index:03d}.safetensors"


def _tensors(jobs: Sequence[JobState]) -> list[torch.Tensor]:
    """In the order in which the manifest names them."""
    return [tensor for job in jobs for chunk in job.chunks for tensor in chunk.tensors.values()]


def _spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tensor.dtype, tuple(tensor.shape))


def _describe(job: JobState) -> dict[str, Any]:
    chunks = [
        {
            "key": chunk.key,
            "meta": chunk.meta,
            "tensors": {name: _spec(tensor).to_json() for name, tensor in chunk.tensors.items()},
        }
        for chunk in job.chunks
    ]
    return {"name": job.name, "meta": job.meta, "chunks": chunks}


def _parse_shard(entry: Any) -> tuple[FileRecord, list[TensorSpec], list[JobState]]:
    """A shard's file, the tensors in it, and its jobs, whose chunks have their tensors' names, not yet the values."""
    specs: list[TensorSpec] = []
    jobs: list[JobState] = []
    record = FileRecord(_field(entry, "size_bytes", int), _field(entry, "xxh3_64", str))
    for job in _field(entry, "jobs", list):
        chunks = []
        for chunk in _field(job, "chunks", list):
            described = _field(chunk, "tensors", dict)
            specs += [TensorSpec.from_json(value) for value in described.values()]
            chunks.append(ChunkState(_field(chunk, "key", int), _meta(chunk), dict.fromkeys(described, torch.empty(0))))
        jobs.append(JobState(_field(job, "name", str), _meta(job), chunks))
    return record, specs, jobs


def _meta(entry: Any) -> dict[str, Any]:
    meta = _field(entry, "meta", dict)
    check_meta(meta)
    return meta


def _field(entry: Any, name: str, kind: type[T]) -> T:
    value = entry.get(name) if isinstance(entry, dict) else None
    if type(value) is not kind:
        raise ValueError(f"{name!r} is malformed (expected {kind.__name__}, got {type(value).__name__})")
    return value
