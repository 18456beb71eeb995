"""The records of a server's files, as bytes: each is checked as a whole, or not believed.

    | header, 56 bytes | up to three frames; further ones are read as part of the third |

The header has the record's number, so that a gap is seen; the sizes of its frames; and an xxh3-64 of everything else in
the record. ``durable`` tells a torn tail from damage: all records below that number were on the disk when
this one was written, so if this one is whole and one of those is not, a synced record was damaged.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, NamedTuple

import xxhash

from psengine.parameter_server.server.log.disk import Disk
from psengine.protocol.frames import encode as encode_message
from psengine.protocol.frames import payload_tensor
from psengine.protocol.messages import Message

MAGIC = b"PSR3"  # with the version of both kinds of files
# magic, kind, number, durable, job, sizes of three frames; then the checksum
_HEADER = struct.Struct("<4sB3xQQQIII4x")
_DIGEST = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _DIGEST.size
_MAX_FRAMES = 3
_WINDOW_BYTES = 1 << 20


class RecordKind(IntEnum):
    """What a record holds."""

    SEGMENT = 1  # the first of a log's segment, and only that: JSON, see ``log.py``
    MESSAGE = 2  # a command: the frames of a message that changed the shard
    COORDINATOR = 3  # JSON, in the log of shard 0: all that its coordinators know, from here on
    DROP = 4  # a job was forgotten
    GENERATION = 5  # the first of a generation, and only that: see ``files.py``
    TENSOR = 6  # a tensor's elements, in a generation
    LIFE = 7  # JSON: from here on this copy of another server leads


class Record(NamedTuple):
    """One record."""

    kind: RecordKind
    job: int = 0  # its number
    frames: Sequence[Any] = ()  # bytes-like; they must not change until they are written
    number: int = 0  # where it was read
    durable: int = 0  # likewise
    in_place: Message | None = None  # of a MESSAGE whose payload lies in a worker's memory, and not in ``frames``

    def whole(self) -> Record:
        """With a copy of such a payload: the worker may write there once it is answered, or has failed."""
        if self.in_place is None:
            return self
        message = replace(self.in_place, place=None, payload=payload_tensor(self.in_place).clone())
        return Record(self.kind, self.job, encode_message(message))

    @property
    def size_bytes(self) -> int:
        """On the disk."""
        return HEADER_BYTES + sum(map(len, self.frames))


def json_record(kind: RecordKind, content: Any) -> Record:
    """A record of a kind that has JSON."""
    return Record(kind, frames=[json.dumps(content).encode()])


def content_of(record: Record) -> Any:
    """What ``json_record`` was given."""
    return json.loads(bytes(record.frames[0]))


def encode(record: Record, number: int, durable: int = 0) -> list[Any]:
    """The bytes-like pieces of a record; its frames are not copied."""
    frames = record.frames
    sizes = [len(frame) for frame in frames[: _MAX_FRAMES - 1]]
    sizes += [0] * (_MAX_FRAMES - 1 - len(sizes)) + [sum(map(len, frames[_MAX_FRAMES - 1 :]))]
    header = _HEADER.pack(MAGIC, record.kind, number, durable, record.job, *sizes)
    return [header + _DIGEST.pack(_digest(header, frames)), *frames]


def decode(pieces: Sequence[Any]) -> Iterator[Record]:
    """The records that ``encode`` made, one behind the other; frames without bytes may be missing.

    Raises:
        ValueError, LookupError: in iteration; one is not as it was.
    """
    at = 0
    while at < len(pieces):
        header, begin = bytes(pieces[at]), at + 1
        magic, kind, number, durable, job, *sizes = _HEADER.unpack_from(header.ljust(HEADER_BYTES))
        at, missing_bytes = begin, sum(sizes)
        while missing_bytes > 0:
            missing_bytes -= len(pieces[at])
            at += 1
        record = Record(RecordKind(kind), job, pieces[begin:at], number, durable)
        if magic != MAGIC or encode(record, number, durable)[0] != header:
            raise ValueError("a record is not as it was sent")
        yield record


def _digest(header: Any, frames: Sequence[Any]) -> int:
    digest = xxhash.xxh3_64(header)
    for frame in frames:
        digest.update(frame)
    return digest.intdigest()


class RecordFile:
    """A file of records, read forwards."""

    def __init__(self, disk: Disk, name: str) -> None:
        self._disk, self._name = disk, name
        self.size_bytes = disk.size_bytes(name)
        self._start, self._bytes = 0, b""

    def record(self, offset: int) -> Record | None:
        """The record that begins there; None where there is none, or none that is as it was written."""
        header = self._get(offset, HEADER_BYTES)
        if len(header) < HEADER_BYTES:
            return None
        magic, kind, number, durable, job, *sizes = _HEADER.unpack_from(header)
        size_bytes = HEADER_BYTES + sum(sizes)
        if magic != MAGIC or offset + size_bytes > self.size_bytes:
            return None
        view, start, frames = memoryview(self._get(offset, size_bytes)), HEADER_BYTES, []
        for size in filter(None, sizes):
            frames.append(view[start : start + size])
            start += size
        if _DIGEST.pack(_digest(view[: _HEADER.size], frames)) != view[_HEADER.size : HEADER_BYTES]:
            return None
        return Record(RecordKind(kind), job, frames, number, durable)

    def records_after(self, offset: int) -> Iterator[Record]:
        """Whole records behind one that is not."""
        for begin in range(offset + 1, self.size_bytes, _WINDOW_BYTES):
            for match in re.finditer(MAGIC, self._get(begin, _WINDOW_BYTES + len(MAGIC) - 1)):
                found = self.record(begin + match.start())
                if found is not None:
                    yield found

    def _get(self, offset: int, size_bytes: int) -> bytes:
        begin = offset - self._start
        if begin < 0 or begin + size_bytes > len(self._bytes):
            self._start, begin = offset, 0
            self._bytes = self._disk.read(self._name, offset, max(size_bytes, _WINDOW_BYTES))
        return self._bytes[begin : begin + size_bytes]
