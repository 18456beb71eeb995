"""The records of a shard's log, as bytes: each is checked as a whole, or not believed.

    | header, 64 bytes | up to three frames |

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

FORMAT = 1
MAGIC = b"PSLG"
# magic, kind, three zero bytes, number, now_s, durable, job, sizes of three frames, four zero bytes; then the checksum
_HEADER = struct.Struct("<4sB3sQdQQIII4s")
_DIGEST = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _DIGEST.size
MAX_FRAMES = 3
# A message has at most a payload of 16 MiB, a body of 64 KiB and a header; a job's members may take more.
MAX_FRAME_BYTES = 64 << 20


class RecordKind(IntEnum):
    """What a record holds; ``core/journal.py`` makes all but SEGMENT and MARK."""

    SEGMENT = 1  # the first of a segment: JSON, see ``log.py``
    MARK = 2  # nothing but ``durable``; written while nothing else is
    MESSAGE = 3  # the frames of a worker's message, which changed a chunk
    MEMBERS = 4  # JSON: what a job knows beside its chunks, and who came or left
    TICK = 5  # some time passed, and answers of a job left because of it
    ENDED = 6  # JSON: an exchange of an averaging job has ended
    DROP = 7  # a job was forgotten


# These take no number: they have that of the next record.
UNNUMBERED = frozenset({RecordKind.SEGMENT, RecordKind.MARK})


class Record(NamedTuple):
    """One record, without its number."""

    kind: RecordKind
    job: int = 0  # its number
    now_s: float = 0.0  # the time that the shard was given
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
    size_bytes: int


def encode(record: Record, number: int, durable: int) -> list[Any]:
    """The bytes-like pieces of a record; its frames are not copied."""
    frames = record.frames
    assert len(frames) <= MAX_FRAMES
    sizes = [len(frame) for frame in frames] + [0] * (MAX_FRAMES - len(frames))
    header = _HEADER.pack(MAGIC, record.kind, bytes(3), number, record.now_s, durable, record.job, *sizes, bytes(4))
    return [header + _DIGEST.pack(_digest(header, frames)), *frames]


def sizes_of(header: bytes) -> tuple[int, ...] | None:
    """The sizes of the frames that follow this header; None where it is none."""
    if len(header) != HEADER_BYTES:
        return None
    magic, kind, zeros, *_, first, second, third, more_zeros = _HEADER.unpack_from(header)
    is_one = magic == MAGIC and kind in _KINDS and not any(zeros) and not any(more_zeros)
    sizes = first, second, third
    return sizes if is_one and max(sizes) <= MAX_FRAME_BYTES else None


def decode(header: bytes, content: bytes) -> Found | None:
    """The record of a header that ``sizes_of`` took, and what follows it; None where it is not what was written."""
    _, kind, _, number, now_s, durable, job, *sizes, _ = _HEADER.unpack_from(header)
    frames, start, view = [], 0, memoryview(content)
    for size in sizes:
        if size:
            frames.append(view[start : start + size])
        start += size
    (expected,) = _DIGEST.unpack_from(header, _HEADER.size)
    if len(content) != start or _digest(header[: _HEADER.size], [view]) != expected:
        return None
    return Found(Record(RecordKind(kind), job, now_s, frames), number, durable, HEADER_BYTES + start)


def _digest(header: bytes, frames: Sequence[Any]) -> int:
    digest = xxhash.xxh3_64(header)
    for frame in frames:
        digest.update(frame)
    return digest.intdigest()


_KINDS = frozenset(RecordKind)
