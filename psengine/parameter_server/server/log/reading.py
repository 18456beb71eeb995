"""A shard's log read back: every record that was durable, or an error that names the file and the place.

The last records may be torn, because the server or the machine died while they were written: nobody was told of them.
They are left out, and said. Anything else that is not as it was written is damage, and refused. A last file that
somebody cut off looks like a torn one, or like a shorter log.
"""

from __future__ import annotations

from collections.abc import Iterator

from psengine.errors import SnapshotError
from psengine.parameter_server.server.log.disk import Disk
from psengine.parameter_server.server.log.log import BEGINNING, Place, segment_name, segments
from psengine.parameter_server.server.log.records import Record, RecordFile, RecordKind, content_of

# Whoever puts a file of this name into a server's directory has it start without the log, from the newest generation.
WITHOUT_LOG = "start-without-log"


class LogReader:
    """The log of one shard from a segment on; iterate once, for all records but those that begin a segment.

    Args:
        start: where a generation's log goes on; the segment has to be there, and those before are not looked at. None:
            from the very first on, if there is any.
        notes: gets what was left out, for people.

    Attributes:
        name, offset: where the record of the iteration is.
        records: how many there were so far.
        end: behind it; after the iteration, where the next life goes on.

    Raises:
        SnapshotError: in iteration; a record that was durable is not there, or not as it was written.
    """

    def __init__(self, disk: Disk, shard: int, start: Place | None, notes: list[str]) -> None:
        self._disk, self._shard, self._start, self._notes = disk, shard, start, notes
        self.name, self.offset, self.records = "", 0, 0
        self.end = start._replace(segment=start.segment - 1) if start else BEGINNING

    def __iter__(self) -> Iterator[Record]:
        there = segments(self._disk).get(self._shard, [])
        first = self.end.segment + 1
        for segment in range(first, max([*there, 0 if self._start is None else first]) + 1):
            self.name, self.offset = segment_name(self._shard, segment), 0
            if segment not in there:
                raise self._damage("the file is missing, and a generation or a later file goes on from it")
            yield from self._read(RecordFile(self._disk, self.name))

    def _read(self, file: RecordFile) -> Iterator[Record]:
        while (found := file.record(self.offset)) is not None:
            self._check_follows(found)
            if found.kind is not RecordKind.SEGMENT:
                self.records += 1
                yield found
            self.offset += found.size_bytes
        if not self.offset:
            raise self._damage("it does not begin as a segment of this version of psengine does")
        if self.offset < file.size_bytes:
            self._check_rest(file)

    def _check_follows(self, found: Record) -> None:
        """Go behind this record; raise unless it follows the last one."""
        is_start, last = found.kind is RecordKind.SEGMENT, self.end
        if is_start != (self.offset == 0):
            raise self._damage("a segment's first record, and only that, describes it")
        if is_start:
            content = content_of(found)
            expected = {"shard": self._shard, "segment": last.segment + 1, "number": found.number}
            is_first = self._start is not None and self._start.segment == last.segment + 1
            expected["epoch" if is_first else "before"] = last.epoch
            if any(content.get(key) != value for key, value in expected.items()):
                raise self._damage(f"another segment's (expected {expected}, got {content})")
            self.end = Place(last.segment + 1, last.number, content["epoch"])
        if found.number != last.number:
            raise self._damage(f"records are missing (expected number {last.number} to follow, got {found.number})")
        self.end = self.end._replace(number=last.number + 1)

    def _check_rest(self, file: RecordFile) -> None:
        """The records end at ``offset``: raise if some that had been durable came after it."""
        if any(found.durable > self.end.number for found in file.records_after(self.offset)):
            number = self.end.number
            raise self._damage(f"record {number} is not as it was written, and a later one says that it was durable")
        rest_bytes = file.size_bytes - self.offset
        self._notes.append(
            f"{self.name}: the last {rest_bytes} bytes, from byte {self.offset} on, are no whole record and are left"
            " out. A server or machine that dies leaves such an end, of which nobody was told; so does a file that was"
            " cut off"
        )

    def _damage(self, reason: str) -> SnapshotError:
        return SnapshotError(
            f"{self.name} is damaged at byte {self.offset}: {reason}. Put a copy of the file back; or, to go back to"
            f" the newest generation and lose what came after it, make an empty file {self._disk}/{WITHOUT_LOG} and"
            " start again."
        )
