"""The records of a shard's log, as bytes: each is checked as a whole, or not believed.

    | header, 56 bytes | up to three frames |

The header has the record's number, so that a gap is seen; the sizes of its frames; and an xxh3-64 of everything else in
the record. ``durable`` tells a torn tail from damage: all records below that number were on the disk when
this one was written, so if this one is whole and one of those is not, a synced record was damaged.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import xxhash

FORMAT = 2
MAGIC = b"PSL2"
# magic, kind, three zero bytes, number, durable, job, sizes of three frames, four bytes of padding; then the checksum
_HEADER = struct.Struct("<4sB3sQQQIII4x")
_DIGEST = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _DIGEST.size
MAX_FRAMES = 3
# A message has at most a payload of 16 MiB, a body of 64 KiB and a header; what coordinators know may take more.
MAX_FRAME_BYTES = 64 << 20


class RecordKind(IntEnum):
    """What a record holds; a shard makes all but SEGMENT and MARK."""

    SEGMENT = 1  # the first of a segment: JSON, see ``log.py``
    MARK = 2  # nothing but ``durable``; written while nothing else is
    MESSAGE = 3  # a command: the frames of a message that changed the shard
    COORDINATOR = 4  # JSON, in the log of shard 0: all that its coordinators know, from here on
    DROP = 5  # a job was forgotten


# These take no number: they have that of the next record.
UNNUMBERED = frozenset({RecordKind.SEGMENT, RecordKind.MARK})


class Record(NamedTuple):
    """One record, without its number."""

    kind: RecordKind
    job: int = 0  # its number
    frames: Sequence[Any] = ()  # bytes-like; they must not change until they are written

    @property
    def size_bytes(self) -> int:
        """On the disk."""
        return HEADER_BYTES + sum(map(len, self.frames))


class Found(NamedTuple):
    """A record that was read."""

    record: Record
    number: int
    durable: int


def encode(record: Record, number: int, durable: int) -> list[Any]:
    """The bytes-like pieces of a record; its frames are not copied."""
    frames = record.frames
    assert len(frames) <= MAX_FRAMES
    sizes = [len(frame) for frame in frames] + [0] * (MAX_FRAMES - len(frames))
    header = _HEADER.pack(MAGIC, record.kind, bytes(3), number, durable, record.job, *sizes)
    return [header + _DIGEST.pack(_digest(header, frames)), *frames]


def size_of(header: bytes) -> int:
    """The size of the record that begins with this; 0 where none does."""
    if len(header) < HEADER_BYTES:
        return 0
    magic, kind, zeros, *_, first, second, third = _HEADER.unpack_from(header)
    is_one = magic == MAGIC and kind in _KINDS and not any(zeros) and max(first, second, third) <= MAX_FRAME_BYTES
    return HEADER_BYTES + first + second + third if is_one else 0


def decode(content: bytes) -> Found | None:
    """The record that these bytes are, ``size_of`` them; None where it is not as it was written."""
    _, kind, _, number, durable, job, *sizes = _HEADER.unpack_from(content)
    frames, start, view = [], HEADER_BYTES, memoryview(content)
    for size in sizes:
        if size:
            frames.append(view[start : start + size])
        start += size
    (expected,) = _DIGEST.unpack_from(content, _HEADER.size)
    if len(content) != start or _digest(view[: _HEADER.size], frames) != expected:
        return None
    return Found(Record(RecordKind(kind), job, frames), number, durable)


def _digest(header: Any, frames: Sequence[Any]) -> int:
    digest = xxhash.xxh3_64(header)
    for frame in frames:
        digest.update(frame)
    return digest.intdigest()


_KINDS = frozenset(RecordKind)
