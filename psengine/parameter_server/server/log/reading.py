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
from psengine.parameter_server.server.log.log import Place, segment_name, segments
from psengine.parameter_server.server.log.records import (
    FORMAT,
    HEADER_BYTES,
    MAGIC,
    UNNUMBERED,
    Found,
    Record,
    RecordKind,
    decode,
    size_of,
)

# Whoever puts a file of this name into a server's directory has it start without the log, from the newest generation.
WITHOUT_LOG = "start-without-log"
_WINDOW_BYTES = 1 << 20


class DamagedLogError(SnapshotError):
    """A log is not what was written; the message names the file and the offset."""

    def __init__(self, disk: Disk, name: str, offset: int, reason: str) -> None:
        super().__init__(
            f"{name} is damaged at byte {offset}: {reason}. Put a copy of the file back; or, to go back to the newest"
            f" generation and lose what came after it, make an empty file {disk}/{WITHOUT_LOG} and start again."
        )


class Placed(NamedTuple):
    """A record, and where it is."""

    record: Record
    number: int
    name: str  # of the segment
    offset: int


class LogReader:
    """The log of one shard from a segment on; iterate once, then ask for the rest.

    Args:
        start: where a generation's log goes on; the segment has to be there, and those before are not looked at. None:
            from the very first on, if there is any.

    Attributes:
        end: number after the last whole record.
        epoch: that of the last segment; 0 without any.
        headless: the last file, where it was being created when the server died; "" otherwise. To be deleted before a
            life of the server writes a segment of that number.
        notes: what was left out, for people.

    Raises:
        DamagedLogError: in iteration; a record that was durable is not there, or not as it was written.
    """

    def __init__(self, disk: Disk, shard: int, start: Place | None = None) -> None:
        self._disk, self._shard, self._start = disk, shard, start
        self.end, self.epoch = (start.first if start else 0), 0
        self.headless = ""
        self.notes: list[str] = []

    def __iter__(self) -> Iterator[Placed]:
        """The records: those that begin a segment, and the numbered ones."""
        start = self._start
        segment = start.segment if start is not None else 1
        last = max([*segments(self._disk).get(self._shard, []), segment if start is not None else 0])
        there = set(self._disk.list())
        for number in range(segment, last + 1):
            name = segment_name(self._shard, number)
            if name not in there:
                raise self._damage(name, 0, "the file is missing, and a generation or a later file goes on from it")
            # Nobody but a generation that goes on in it knows that a last file without a beginning had one.
            may_be_new = number == last and (start is None or number > segment)
            yield from self._read(number, name, may_be_new=may_be_new)

    def _read(self, segment: int, name: str, *, may_be_new: bool) -> Iterator[Placed]:
        file, offset = _Window(self._disk, name), 0
        while (found := file.record(offset)) is not None:
            self._check_follows(found, segment, offset, name)
            if found.record.kind is not RecordKind.MARK:
                self.end += found.record.kind not in UNNUMBERED
                yield Placed(found.record, found.number, name, offset)
            offset += found.record.size_bytes
        if offset < file.size_bytes:
            self._check_rest(file, offset, name)
        if not offset:
            if not may_be_new:
                raise self._damage(name, 0, "it does not begin as a segment of this version of psengine does")
            self.headless = name

    def _check_follows(self, found: Found, segment: int, offset: int, name: str) -> None:
        """Raise unless this record follows the last one."""
        is_start = found.record.kind is RecordKind.SEGMENT
        if is_start != (offset == 0):
            raise self._damage(name, offset, "a segment's first record, and only that, describes it")
        if is_start:
            content = content_of(found.record)
            expected = {"format": FORMAT, "shard": self._shard, "segment": segment, "first": found.number}
            if self.epoch:
                expected["before"] = self.epoch
            elif self._start is not None:
                expected["epoch"] = self._start.epoch
            if any(content.get(key) != value for key, value in expected.items()):
                raise self._damage(name, 0, f"another segment's (expected {expected}, got {content})")
            self.epoch = content["epoch"]
        if found.number != self.end:
            text = f"records are missing (expected number {self.end} to follow, got {found.number})"
            raise self._damage(name, offset, text)

    def _check_rest(self, file: _Window, offset: int, name: str) -> None:
        """The records end at ``offset``: raise if some that had been durable came after it."""
        if any(found.durable > self.end for found in file.records_after(offset)):
            text = f"record {self.end} is not as it was written, and a later one says that it was durable"
            raise self._damage(name, offset, text)
        rest_bytes = file.size_bytes - offset
        self.notes.append(
            f"{name}: the last {rest_bytes} bytes, from byte {offset} on, are no whole record and are left out. A"
            " server or machine that dies leaves such an end, of which nobody was told; so does a file that was cut off"
        )

    def _damage(self, name: str, offset: int, reason: str) -> DamagedLogError:
        return DamagedLogError(self._disk, name, offset, reason)


def describe(disk: Disk, name: str) -> str:
    """What a segment begins with, for people."""
    found = _Window(disk, name).record(0)
    if found is None or found.record.kind is not RecordKind.SEGMENT:
        return "nothing whole in it"
    return "from record {first}, of the server's life {epoch:x}".format(**content_of(found.record))


class _Window:
    """A file, read forwards in pieces."""

    def __init__(self, disk: Disk, name: str) -> None:
        self._disk, self._name = disk, name
        self.size_bytes = disk.size_bytes(name)
        self._start, self._bytes = 0, b""

    def _get(self, offset: int, size_bytes: int) -> bytes:
        begin = offset - self._start
        if begin < 0 or begin + size_bytes > len(self._bytes):
            self._start, begin = offset, 0
            self._bytes = self._disk.read(self._name, offset, max(size_bytes, _WINDOW_BYTES))
        return self._bytes[begin : begin + size_bytes]

    def record(self, offset: int) -> Found | None:
        """The record that begins there; None where there is none, or none that is whole."""
        size_bytes = size_of(self._get(offset, HEADER_BYTES))
        is_there = size_bytes and offset + size_bytes <= self.size_bytes
        return decode(self._get(offset, size_bytes)) if is_there else None

    def records_after(self, offset: int) -> Iterator[Found]:
        """Whole records behind one that is not."""
        offset += 1
        while offset < self.size_bytes:
            at = self._get(offset, min(_WINDOW_BYTES, self.size_bytes - offset)).find(MAGIC)
            if at < 0:
                offset += _WINDOW_BYTES - len(MAGIC) + 1
                continue
            found = self.record(offset + at)
            if found is not None:
                yield found
            offset += at + (found.record.size_bytes if found is not None else 1)


def content_of(record: Record) -> Any:
    """The content of a SEGMENT or a COORDINATOR record."""
    return json.loads(bytes(record.frames[0]))
