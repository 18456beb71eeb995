"""A shard's log read back: every record that was durable, or an error that names the file and the place.

The last records may be torn, because the server or the machine died while they were written: nobody was told of them.
They are left out, and said. Anything else that is not as it was written is damage, and refused. A last file that
somebody cut off looks like a torn one, or like a shorter log.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from psengine.errors import SnapshotError
from psengine.parameter_server.server.log.disk import Disk
from psengine.parameter_server.server.log.log import segment_name, segments
from psengine.parameter_server.server.log.records import (
    FORMAT,
    HEADER_BYTES,
    MAGIC,
    UNNUMBERED,
    Found,
    Record,
    RecordKind,
    decode,
    sizes_of,
)

_WINDOW_BYTES = 1 << 20


class DamagedLogError(SnapshotError):
    """A log is not what was written; the message names the file and the offset."""

    def __init__(self, name: str, offset: int, reason: str) -> None:
        super().__init__(
            f"{name} is damaged at byte {offset}: {reason}. Put a copy of the file back; or, to go back to the newest"
            " snapshot and lose what came after it, move all log-* files away."
        )


class Placed(NamedTuple):
    """A record, and where it is."""

    record: Record
    number: int
    segment: int
    offset: int


class LogReader:
    """The log of one shard from a segment on; iterate once, then ask for the rest.

    Args:
        start: the first segment that is needed; those before are not looked at.
        first: number of its first record; None believes the segment.

    Attributes:
        end: number after the last whole record.
        last_segment: the highest number of those that begin as a segment does; ``start - 1`` without any.
        headless: the last file, where it was being created when the server died; "" otherwise. To be deleted before a
            life of the server writes a segment of that number.
        notes: what was left out, for people.

    Raises:
        DamagedLogError: in iteration; a record that was durable is not there, or not as it was written.
    """

    def __init__(self, disk: Disk, shard: int, start: int = 1, first: int | None = 0) -> None:
        self.shard = shard
        self._disk = disk
        self._numbers = [number for number in segments(disk).get(shard, []) if number >= start]
        self._start = start
        self.end = first or 0
        self._is_first_known = first is not None
        self.last_segment = start - 1
        self.headless = ""
        self.notes: list[str] = []

    def __iter__(self) -> Iterator[Placed]:
        """The records: those that begin a life of the server, and the numbered ones."""
        for expected, number in enumerate(self._numbers, self._start):
            if number != expected:
                name = segment_name(self.shard, expected)
                raise DamagedLogError(name, 0, f"the file is missing, and {segment_name(self.shard, number)} is there")
        for number in self._numbers:
            yield from self._read(number, is_last=number == self._numbers[-1])

    def _read(self, segment: int, *, is_last: bool) -> Iterator[Placed]:
        name = segment_name(self.shard, segment)
        file, offset = _Window(self._disk, name), 0
        while offset < file.size_bytes:
            found = file.record(offset)
            if found is None:
                break
            self._check_follows(found, segment, offset, name)
            if found.record.kind is not RecordKind.MARK:
                self.end += found.record.kind not in UNNUMBERED
                yield Placed(found.record, found.number, segment, offset)
            offset += found.size_bytes
        self._check_rest(file, name, offset)
        if offset:
            self.last_segment = segment
        elif is_last:
            self.headless = name
        else:
            raise DamagedLogError(name, 0, "it does not begin as a segment does, and later ones are there")

    def _check_follows(self, found: Found, segment: int, offset: int, name: str) -> None:
        """Raise unless this record follows the last one."""
        is_start = found.record.kind is RecordKind.SEGMENT
        if is_start != (offset == 0):
            raise DamagedLogError(name, offset, "a segment's first record, and only that, describes it")
        if is_start:
            content = json.loads(bytes(found.record.frames[0]))
            expected = {"format": FORMAT, "shard": self.shard, "segment": segment, "first": found.number}
            if any(content.get(key) != value for key, value in expected.items()):
                raise DamagedLogError(name, 0, f"another segment's (expected {expected}, got {content})")
        if is_start and not self._is_first_known:
            self.end, self._is_first_known = found.number, True
        if found.number != self.end:
            text = f"records are missing (expected number {self.end} to follow, got {found.number})"
            raise DamagedLogError(name, offset, text)

    def _check_rest(self, file: _Window, name: str, offset: int) -> None:
        """The records end at ``offset``: raise if some that had been durable came after it."""
        rest_bytes = file.size_bytes - offset
        if not rest_bytes:
            return
        for later, found in file.records_after(offset):
            if found.durable > self.end:
                text = (
                    f"record {self.end} is not as it was written, and the one at byte {later} says that it was durable"
                )
                raise DamagedLogError(name, offset, text)
        self.notes.append(
            f"{name}: the last {rest_bytes} bytes, from byte {offset} on, are no whole record and are left out. A"
            " server or machine that dies leaves such an end, of which nobody was told; so does a file that was cut off"
        )


class _Window:
    """A file, read forwards in pieces."""

    def __init__(self, disk: Disk, name: str) -> None:
        self._disk = disk
        self._name = name
        self.size_bytes = disk.size_bytes(name)
        self._start = 0
        self._bytes = b""

    def _get(self, offset: int, size_bytes: int) -> bytes:
        begin = offset - self._start
        if begin < 0 or begin + size_bytes > len(self._bytes):
            self._start, begin = offset, 0
            self._bytes = self._disk.read(self._name, offset, max(size_bytes, _WINDOW_BYTES))
        return self._bytes[begin : begin + size_bytes]

    def record(self, offset: int) -> Found | None:
        """The record that begins there; None where there is none, or none that is whole."""
        header = self._get(offset, HEADER_BYTES)
        sizes = sizes_of(header)
        if sizes is None or offset + HEADER_BYTES + sum(sizes) > self.size_bytes:
            return None
        return decode(header, self._get(offset + HEADER_BYTES, sum(sizes)))

    def records_after(self, offset: int) -> Iterator[tuple[int, Found]]:
        """Whole records behind one that is not."""
        offset += 1
        while offset < self.size_bytes:
            piece = self._get(offset, min(_WINDOW_BYTES, self.size_bytes - offset))
            at = piece.find(MAGIC)
            if at < 0:
                offset += max(1, len(piece) - len(MAGIC) + 1)
                continue
            found = self.record(offset + at)
            if found is not None:
                yield offset + at, found
            offset += at + (found.size_bytes if found is not None else 1)


def start_of(placed: Placed) -> dict[str, Any]:
    """The content of a SEGMENT record."""
    content: dict[str, Any] = json.loads(bytes(placed.record.frames[0]))
    return content
