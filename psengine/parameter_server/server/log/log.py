"""One shard's write-ahead log: what is to be written, and how far it is durable. No thread, no clock, no disk.

    shard    append ─ append ─ append ─────────── append         end: number of the next record
    writer        pending ──► write ─► sync ─► synced            durable: all records below are on the disk
                  (a group, with one sync)      └ answers that waited for it leave

Several records become durable by one sync (group commit): those that came while the last group was being synced. A
shard answers an update once ``durable`` has reached what ``end`` was after it.

The log is cut into segments, files of their own. ``cut`` begins one at a snapshot: the snapshot and the segments from
there on are the state, so the snapshot is not kept before that segment has ``begun`` on the disk. An older segment is
complete and synced before the next file is created. A life of the server never writes to a former life's segments; each
segment names its life's epoch and that of the segment before it, so that no file can stand for another.

A daemon runs ``SegmentWriter`` in a thread (``durability/log_thread.py``). A simulation calls the same steps itself:

    log.append(record)                     as a shard does
    batch = log.pending()                  None: there is nothing to write
    writer.write(batch); writer.sync()     over a ``Disk``; OSError as ``SegmentWriter`` says
    log.synced(batch.upto)
"""

from __future__ import annotations

import errno
import json
import re
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from psengine.parameter_server.server.log.disk import Disk, DiskFile
from psengine.parameter_server.server.log.records import FORMAT, UNNUMBERED, Record, RecordKind, encode

# A group is handed over in parts of about this many bytes: answers to the first leave while the next are being synced.
MAX_BATCH_BYTES = 8 << 20


class Place(NamedTuple):
    """Where a snapshot's log goes on."""

    segment: int
    first: int  # number of the segment's first record
    epoch: int  # of the life that wrote the segment


class LogStart(NamedTuple):
    """Where a life of the server begins to write the log of one shard."""

    shard: int
    segment: int  # number of its first segment; above all that are there
    first: int  # number of its first record: as many as there were before
    epoch: int  # of the server
    before: int = 0  # the epoch of the segment before the first; 0 without one


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
            number += record.kind not in UNNUMBERED
        return pieces


class ShardLog:
    """See the module's text. Used by one thread at a time."""

    def __init__(self, start: LogStart) -> None:
        self.start = start
        self.end = start.first
        self.durable = start.first
        self.written_bytes = 0  # of this life, synced or not
        self._place: Place | None = None  # of the segment that records go to
        # Records that wait, with the segment they go to.
        self._waiting: deque[tuple[int, Record]] = deque()
        self._handed = start.first  # number of the next record to hand over
        self.cut()

    @property
    def segment(self) -> int:
        """Number of the segment that the next record goes to."""
        return self.start.segment - 1 if self._place is None else self._place.segment

    @property
    def is_empty(self) -> bool:
        """Whether all that was appended was handed over."""
        return not self._waiting

    def append(self, record: Record) -> int:
        """Add a record; ``durable`` has to reach the number that this returns before anybody is told of it."""
        self._waiting.append((self.segment, record))
        self.end += 1
        return self.end

    def cut(self) -> Place:
        """Records from here on go to a new segment; to the same, where it has none yet."""
        start = self.start
        if self._place is None or self._place.first != self.end:
            before = start.before if self._place is None else start.epoch
            self._place = Place(self.segment + 1, self.end, start.epoch)
            content = {"format": FORMAT, "shard": start.shard, "before": before, **self._place._asdict()}
            record = Record(RecordKind.SEGMENT, frames=[json.dumps(content).encode()])
            self._waiting.append((self.segment, record))
        return self._place

    def pending(self) -> Batch | None:
        """Records to write, which are handed over by this; None where there are none."""
        if not self._waiting:
            return None
        segment, first = self._waiting[0]
        records: list[Record] = []
        size_bytes = 0
        while self._waiting and self._waiting[0][0] == segment and size_bytes < MAX_BATCH_BYTES:
            records.append(self._waiting.popleft()[1])
            size_bytes += records[-1].size_bytes
        is_new = first.kind is RecordKind.SEGMENT
        number, self._handed = self._handed, self._handed + len(records) - is_new
        self.written_bytes += size_bytes
        return Batch(segment, is_new, records, number, self._handed, self.durable)

    def synced(self, upto: int) -> None:
        """All records below this number are on the disk."""
        assert self.durable <= upto <= self._handed, "the log was told of records that were not handed over"
        self.durable = upto


class SegmentWriter:
    """Writes one shard's batches to its segments. An OSError of ``sync`` ends the log: it must not be used again.

    An OSError of ``write`` with ENOSPC leaves everything as it was: the same batch may be written again.

    Attributes:
        begun: number of the newest segment whose file is on the disk, with its beginning.
    """

    def __init__(self, disk: Disk, shard: int) -> None:
        self.begun = 0
        self._disk = disk
        self._shard = shard
        self._file: DiskFile | None = None
        self._segment = -1

    def write(self, batch: Batch) -> None:
        """Write a batch's records; a new segment is durable afterwards."""
        name = segment_name(self._shard, batch.segment)
        if batch.segment != self._segment:
            self.close()
            self._file = self._disk.create(name)
            self._segment = batch.segment
        assert self._file is not None
        self._file.append(batch.pieces())
        if batch.is_new:
            try:
                self._file.sync()
                self._disk.sync_names()
            except OSError as error:
                # A sync that failed, not a lack of room for records: they are written, and it is not tried again.
                raise OSError(errno.EIO, f"it could not be made durable: {error}", name) from error
            self.begun = batch.segment

    def sync(self) -> None:
        """Make durable what was written; also where nothing was, it fails once somebody removed the file."""
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


_NAME = re.compile(r"log-(\d{3})-(\d{12})")


def segment_name(shard: int, segment: int) -> str:
    """The name of a segment's file."""
    return f"log-{shard:03d}-{segment:012d}"


def segments(disk: Disk) -> dict[int, list[int]]:
    """By shard, the numbers of the segments that are there, ascending."""
    found: dict[int, list[int]] = {}
    for match in filter(None, map(_NAME.fullmatch, disk.list())):
        found.setdefault(int(match[1]), []).append(int(match[2]))
    return {shard: sorted(numbers) for shard, numbers in sorted(found.items())}
