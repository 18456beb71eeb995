"""One shard's write-ahead log: what is to be written, and how far it is durable. No thread, no clock, no disk.

    shard    append ─ append ─ append ─────────── append         end: number of the next record
    writer        pending ──► write ─► sync ─► synced            durable: all records below are on the disk
                  (a group, with one sync)      └ answers that waited for it leave

Several records become durable by one sync (group commit): those that came while the last group was being synced. A
shard answers an update once ``durable`` has reached what ``end`` was after it.

The log is cut into segments, files of their own. ``cut`` begins one, at the moment of a snapshot: the snapshot and the
segments from there on are the state. An older segment is complete and synced before the next file is created. A life of
the server never writes to a former life's segments.

A daemon runs ``SegmentWriter`` in a thread (``durability/log_thread.py``). A simulation calls the same steps itself:

    log.append(record)                     as ``core/journal.py`` does
    batch = log.pending()                  None: there is nothing to write
    writer.write(batch); writer.sync()     over a ``Disk``; OSError as ``SegmentWriter`` says
    log.synced(batch.upto)
"""

from __future__ import annotations

import errno
import json
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from psengine.parameter_server.server.log.disk import Disk, DiskFile
from psengine.parameter_server.server.log.records import FORMAT, Record, RecordKind, encode

# A group is handed over in parts of about this many bytes: answers to the first leave while the next are being synced.
MAX_BATCH_BYTES = 8 << 20


class LogStart(NamedTuple):
    """Where a life of the server begins to write the log of one shard."""

    shard: int
    segment: int  # number of its first segment; above all that are there
    first: int  # number of its first record: as many as there were before
    epoch: int  # of the server


class Batch(NamedTuple):
    """Records to write, of one segment."""

    segment: int
    is_new: bool  # the segment's file is to be created
    records: Sequence[Record]  # for a new one its SEGMENT record is the first
    number: int  # of the first numbered one
    upto: int  # number after the last
    durable: int  # known when the batch was made

    def pieces(self) -> list[Any]:
        """The bytes-like pieces of its records."""
        pieces: list[Any] = []
        number = self.number
        for record in self.records:
            pieces += encode(record, number, self.durable)
            number += record.kind is not RecordKind.SEGMENT
        return pieces

    @property
    def size_bytes(self) -> int:
        """Of its pieces."""
        return sum(record.size_bytes for record in self.records)


class ShardLog:
    """See the module's text. Used by one thread at a time."""

    def __init__(self, start: LogStart) -> None:
        self.start = start
        self.end = start.first
        self.durable = start.first
        self.pending_bytes = 0  # appended, and not handed over yet
        self.written_bytes = 0  # of this life, synced or not
        # Records that wait, with the segment they go to.
        self._waiting: deque[tuple[int, Record]] = deque()
        self._segment = start.segment - 1  # the one that records go to; the first cut begins the first
        self._handed = start.first  # number of the next record to hand over
        self.cut()

    @property
    def segment(self) -> int:
        """Number of the segment that the next record goes to."""
        return self._segment

    def append(self, record: Record) -> int:
        """Add a record; ``durable`` has to reach the number that this returns before anybody is told of it."""
        self._add(record)
        self.end += 1
        return self.end

    def _add(self, record: Record) -> None:
        self._waiting.append((self._segment, record))
        self.pending_bytes += record.size_bytes

    def cut(self) -> int:
        """Records from here on go to a new segment; its number."""
        self._segment += 1
        start = self.start
        content = {
            "format": FORMAT,
            "shard": start.shard,
            "segment": self._segment,
            "first": self.end,
            "epoch": start.epoch,
            "begins_life": self._segment == start.segment,
        }
        self._add(Record(RecordKind.SEGMENT, frames=[json.dumps(content).encode()]))
        return self._segment

    def pending(self) -> Batch | None:
        """Records to write, which are handed over by this; None where there are none."""
        if not self._waiting:
            return None
        segment, first = self._waiting[0]
        records: list[Record] = []
        size_bytes = 0
        while self._waiting and self._waiting[0][0] == segment and size_bytes < MAX_BATCH_BYTES:
            record = self._waiting.popleft()[1]
            records.append(record)
            size_bytes += record.size_bytes
        is_new = first.kind is RecordKind.SEGMENT
        number, self._handed = self._handed, self._handed + len(records) - is_new
        self.pending_bytes -= size_bytes
        self.written_bytes += size_bytes
        return Batch(segment, is_new, records, number, self._handed, self.durable)

    def synced(self, upto: int) -> None:
        """All records below this number are on the disk."""
        assert self.durable <= upto <= self._handed, "the log was told of records that were not handed over"
        self.durable = upto


class SegmentWriter:
    """Writes one shard's batches to its segments. An OSError of ``sync`` ends the log: it must not be used again.

    An OSError of ``write`` with ENOSPC leaves everything as it was: the same batch may be written again.
    """

    def __init__(self, disk: Disk, shard: int) -> None:
        self._disk = disk
        self._shard = shard
        self._file: DiskFile | None = None
        self._segment = -1
        self._name = ""

    def write(self, batch: Batch) -> None:
        """Write a batch's records."""
        if batch.segment != self._segment:
            self.close()
            self._name = segment_name(self._shard, batch.segment)
            self._file = self._disk.create(self._name)
            self._segment = batch.segment
        assert self._file is not None
        self._file.append(batch.pieces())
        if batch.is_new:
            try:
                self._disk.sync_names()
            except OSError as error:
                # A sync that failed, not a lack of room for records: they are written, and it is not tried again.
                raise OSError(errno.EIO, f"its name could not be made durable: {error}", self._name) from error

    def sync(self) -> None:
        """Make durable what was written."""
        if self._file is not None:
            self._file.sync()

    def mark(self, durable: int) -> None:
        """Note behind the last batch, which was synced and ends here, that it is durable; without a sync.

        The next batch would say so too, but may be long in coming.
        """
        if self._file is not None:
            self._file.append(encode(Record(RecordKind.MARK), durable, durable))

    def close(self) -> None:
        """Release the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


_PREFIX = "log-"


def segment_name(shard: int, segment: int) -> str:
    """The name of a segment's file."""
    return f"{_PREFIX}{shard:03d}-{segment:012d}"


def segments(disk: Disk) -> dict[int, list[int]]:
    """By shard, the numbers of the segments that are there, ascending."""
    found: dict[int, list[int]] = {}
    for name in disk.list():
        if name.startswith(_PREFIX):
            with suppress(ValueError):
                shard, segment = (int(part) for part in name.removeprefix(_PREFIX).split("-"))
                if name == segment_name(shard, segment):
                    found.setdefault(shard, []).append(segment)
    return {shard: sorted(numbers) for shard, numbers in sorted(found.items())}


def delete_before(disk: Disk, starts: dict[int, int]) -> None:
    """Delete segments that no kept snapshot needs; ``starts``: by shard, the first that is needed."""
    for shard, numbers in segments(disk).items():
        for number in numbers:
            if number < starts.get(shard, 0):
                disk.delete(segment_name(shard, number))
