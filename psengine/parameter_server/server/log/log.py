"""One shard's write-ahead log: records in, a durable number out. No thread, no clock.

    shard     append ─ append ─ append ─────────── append         end: number of the next record
    writer      write (those that wait) ─────► write              (a group, with one sync)
    syncer                              sync ────────► sync       durable: all records below are on the disk
                                           └ answers that waited for it leave

Several records become durable by one sync (group commit): those that came while the last group was being synced. A
shard answers an update once ``durable`` has reached what ``end`` was after it.

The log is cut into segments, files of their own. ``cut`` begins one at a snapshot: the snapshot and the segments from
there on are the state, so the snapshot is not kept before that segment has ``begun`` on the disk. An older segment is
complete and synced before the next file is created. A life of the server never writes to a former life's segments; each
segment names its life's epoch and that of the segment before it, so that no file can stand for another.

A daemon has a thread for each of the three (``durability/log_thread.py``), a simulation calls them itself.
"""

from __future__ import annotations

import errno
import re
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from psengine.parameter_server.server.log.disk import Disk, DiskFile
from psengine.parameter_server.server.log.records import Record, RecordKind, encode, json_record

# A group is written in parts of about this many bytes: answers to the first leave while the next are being synced.
MAX_BATCH_BYTES = 8 << 20


class Place(NamedTuple):
    """Where a log goes on: behind a snapshot, or a former life."""

    segment: int  # the one that begins here, or the last that was written
    number: int  # of the next record
    epoch: int  # of the life that wrote the segment


# The least distance between the epochs of a server's lives, since each life numbers processes from its epoch on. An
# epoch by the clock grows by as much in a second, and 2^32 lives whose clock was set back reach half of the field.
EPOCHS_APART = 1 << 30


def later_epoch(drawn: int, *former: int) -> int:
    """The epoch of a life that follows those of ``former``: ``drawn`` by the clock, or a later one if it is too low."""
    least = max(former, default=0) + EPOCHS_APART
    # The remainder keeps two servers apart that follow the same life.
    return drawn if drawn >= least else least + drawn % EPOCHS_APART


# Before the first life.
BEGINNING = Place(segment=0, number=0, epoch=0)


class ShardLog:
    """See the module's text. An OSError of ``sync``, and of ``write`` but for a full disk, ends the log.

    Args:
        disk: where it is written.
        shard: whose it is.
        epoch: of the server.
        last: where its former lives ended.

    Attributes:
        end: number of the next record.
        written: all records below are written.
        durable: all records below are on the disk.
        begun: number of the newest segment whose file is on the disk, with its beginning.
        written_bytes: of this life, synced or not.
        failure: why nothing becomes durable any more; said by whoever writes it.
        is_open: it takes records, as long as it is there.
        on_change: called where there is something to write.
    """

    is_open = True

    def __init__(self, disk: Disk, shard: int, epoch: int, last: Place = BEGINNING) -> None:
        self.shard = shard
        self.end = self.durable = self.written = last.number
        self.begun = last.segment
        self.written_bytes = 0
        self.failure = ""
        self.on_change: Callable[[], None] = lambda: None
        self._disk, self._epoch = disk, epoch
        self._place = last  # of the segment that records go to
        self._waiting: deque[Record] = deque()
        self._batch: list[Record] = []  # being written
        self._file: DiskFile | None = None
        self._syncing = threading.Lock()
        self.cut()

    # ---- of the shard ------------------------------------------------------------------------------------------

    def append(self, record: Record) -> int:
        """Add a record; ``durable`` has to reach the number that this returns before anybody is told of it."""
        self._waiting.append(record.whole())
        self.end += 1
        self.on_change()
        return self.end

    def cut(self) -> Place:
        """Records from here on go to a new segment; to the same, where it has none yet."""
        before = self._place
        if before.number + 1 != self.end:
            self._place = Place(before.segment + 1, self.end, self._epoch)
            content = {"shard": self.shard, "before": before.epoch, **self._place._asdict()}
            self.append(json_record(RecordKind.SEGMENT, content))
        return self._place

    # ---- of the writer -----------------------------------------------------------------------------------------

    @property
    def has_unwritten(self) -> bool:
        """Whether ``write`` has something to do."""
        return bool(self._batch or self._waiting)

    def write(self, room_bytes: float = float("inf")) -> None:
        """Write records that wait, of one segment; a new segment is durable afterwards.

        Args:
            room_bytes: what may be filled; a segment that a snapshot waits for takes more.

        Raises:
            OSError: one of ``FULL_ERRORS``: nothing has changed, and the next call tries the same again.
        """
        if not self._batch:
            self._take()
        if not self._batch:
            return
        size_bytes = sum(record.size_bytes for record in self._batch)
        if size_bytes > room_bytes and self.begun == self._place.segment:
            raise OSError(errno.ENOSPC, "no room is left but what a snapshot needs", str(self._disk))
        if self._file is None:
            self._file = self._disk.create(segment_name(self.shard, self.begun + 1))
        pieces = [encode(record, number, self.durable) for number, record in enumerate(self._batch, self.written)]
        self._file.append([piece for of_record in pieces for piece in of_record])
        if self._batch[0].kind is RecordKind.SEGMENT:
            with self._syncing:  # a sync would look for the file under its former name
                self._file.commit()
            self.begun += 1
        self.written += len(self._batch)
        self.written_bytes += size_bytes
        self._batch = []

    def _take(self) -> None:
        """The next records, which end before a segment does."""
        size_bytes = 0
        while self._waiting and size_bytes < MAX_BATCH_BYTES:
            if self._waiting[0].kind is RecordKind.SEGMENT:
                if self._batch:
                    return
                self.sync()
                self.close()
            self._batch.append(self._waiting.popleft())
            size_bytes += self._batch[-1].size_bytes

    def close(self) -> None:
        """Release the file."""
        with self._syncing:
            if self._file is not None:
                self._file.close()
                self._file = None

    # ---- of the syncer -----------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Make durable what was written; also where nothing was, it fails once somebody removed the file."""
        with self._syncing:
            written = self.written
            if self._file is not None:
                self._file.sync()
            self.durable = written


_NAME = re.compile(r"log-(\d{3})-(\d{12})")


def segment_name(shard: int, segment: int) -> str:
    """The name of a segment's file."""
    return f"log-{shard:03d}-{segment:012d}"


def segments(disk: Disk) -> dict[int, list[int]]:
    """By shard, the numbers of the segments that are there, ascending."""
    found: dict[int, list[int]] = {}
    for match in filter(None, map(_NAME.fullmatch, sorted(disk.list()))):
        found.setdefault(int(match[1]), []).append(int(match[2]))
    return found
