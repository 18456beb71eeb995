"""The threads that write one shard's log.

    shard's thread   append ─ append ─ append ─ append ──────► goes on at once; the answers are held
    log thread             write ─── write ─── write ───►
    its sync thread              sync ─ wake ── sync ─ wake     each makes durable what was written before it

The shard's thread never waits for the disk. Writing, which copies to the page cache, goes on during a sync.
"""

from __future__ import annotations

import errno
import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from psengine.errors import SnapshotError
from psengine.parameter_server.server.log.disk import Disk
from psengine.parameter_server.server.log.log import Batch, LogStart, Place, SegmentWriter, ShardLog
from psengine.parameter_server.server.log.records import Record, RecordKind
from psengine.parameter_server.server.snapshots.generations import FULL_ERRORS, LOW_BYTES
from psengine.parameter_server.server.transport.shard_thread import HeldAnswers
from psengine.parameter_server.status_model import LogStatus

logger = logging.getLogger(__name__)

# How often a full disk is tried again, and the room and an idle log's file are looked at; the longest wait, too.
LOOK_S = 1.0
# How often people are told of a disk that is almost full, and a snapshot is asked for, after which older segments go.
LOW_REPEAT_S = 60.0


class LogThread(threading.Thread):
    """Writes a shard's log until ``end``. A disk that fails ends the shard; one that is full has it wait.

    Args:
        start: where to begin.
        answers: the shard's; woken with every sync.
        note: takes an event's kind and text.
        want_snapshot: called where older segments should go.
        memory_bytes: what the shard holds; called in its thread.
        reserved_bytes: room that is left for a snapshot.

    Attributes:
        needed_bytes: of ``memory_bytes``, when a record came last.
    """

    def __init__(
        self,
        disk: Disk,
        start: LogStart,
        answers: HeldAnswers,
        note: Callable[[str, str], None],
        want_snapshot: Callable[[], object],
        memory_bytes: Callable[[], int],
        reserved_bytes: Callable[[], int],
    ) -> None:
        super().__init__(name=f"psengine-log-{start.shard}", daemon=True)
        self.log = ShardLog(start)
        self._disk = disk
        self._writer = SegmentWriter(disk, start.shard)
        self._answers, self._note, self._want_snapshot = answers, note, want_snapshot
        self._memory_bytes, self._reserved_bytes = memory_bytes, reserved_bytes
        self._measured_s = float("-inf")
        self.needed_bytes = 0
        self._changed = threading.Condition()
        self._ends = False
        self._has_written = False  # all that ever will be
        self._written = start.first  # number after the last record that was written
        self._has_unsynced = False
        self._looked_s = self._told_low_s = float("-inf")
        self.syncs, self.sync_s = 0, 0.0
        self.is_full = False
        self.free_bytes: int | None = None  # when the room was looked at last
        self.error = ""

    # ---- in the shard's thread ---------------------------------------------------------------------------------

    def append(self, record: Record) -> int:
        """See ``ShardLog.append``."""
        now_s = time.monotonic()
        if now_s >= self._measured_s + LOOK_S:
            self._measured_s, self.needed_bytes = now_s, self._memory_bytes()
        with self._changed:
            number = self.log.append(record)
            self._changed.notify_all()
        return number

    def append_coordinator(self, meta: Any) -> int:
        """Log what the coordinators know now; of shard 0."""
        return self.append(Record(RecordKind.COORDINATOR, frames=[json.dumps(meta).encode()]))

    def cut(self) -> Place:
        """See ``ShardLog.cut``."""
        with self._changed:
            place = self.log.cut()
            self._changed.notify_all()
        return place

    # ---- for other threads -------------------------------------------------------------------------------------

    def await_begun(self, segment: int, deadline_s: float) -> None:
        """Wait until a segment is on the disk, with its beginning.

        Raises:
            SnapshotError: it is not there within ``deadline_s``, or never will be.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._writer.begun >= segment or self.error, deadline_s)
            if self._writer.begun >= segment:
                return
        why = self.error or ("its disk is full" if self.is_full else f"it did not in {deadline_s:g} s")
        raise SnapshotError(f"the log of shard {self.log.start.shard} cannot begin segment {segment}: {why}")

    def end(self) -> None:
        """Write what is there, then end; join afterwards."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()

    def status(self) -> LogStatus:
        """How far it is."""
        log = self.log
        return LogStatus(
            shard=log.start.shard,
            waiting_records=log.end - log.durable,
            written_bytes=log.written_bytes,
            syncs=self.syncs,
            sync_seconds=round(self.sync_s, 3),
            is_full=self.is_full,
            free_bytes=self.free_bytes,
            error=self.error,
        )

    # ---- in its threads ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """The loop."""
        syncing = threading.Thread(target=self._guarded, args=[self._sync_all], name=f"{self.name}-sync", daemon=True)
        syncing.start()
        self._guarded(self._write_all)
        with self._changed:
            self._has_written = True
            self._changed.notify_all()
        while syncing.is_alive():
            syncing.join(LOOK_S)
        self._writer.close()

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as error:
            text = f"the log of shard {self.log.start.shard} cannot be written any more: {error}"
            self._tell(
                logging.CRITICAL,
                "log_failed",
                f"{text}. Nothing is acknowledged, and the server ends: what was not durable may be gone, so that a"
                " second try could lie. Look at the disk, then start the server again",
            )
            with self._changed:
                self.error, self._ends = text, True
                self._changed.notify_all()
            self._answers.fail(text)

    def _tell(self, level: int, kind: str, text: str) -> None:
        logger.log(level, "%s", text)
        self._note(kind, text)

    def _write_all(self) -> None:
        marked = -1
        while not self.error:
            self._look()
            with self._changed:
                batch = self.log.pending()
                is_idle = batch is None and self._written == self.log.durable
                if batch is None and (not is_idle or marked == self._written):
                    if self._ends:
                        return
                    self._changed.wait(LOOK_S)
                    continue
            if batch is None:
                marked = self._written
                try:
                    self._writer.mark(marked)
                except OSError as error:
                    if error.errno not in FULL_ERRORS:
                        raise
                continue
            if not self._write(batch):
                return
            with self._changed:
                self._written = batch.upto
                self._has_unsynced = True
                self._changed.notify_all()

    def _sync_all(self) -> None:
        while True:
            with self._changed:
                self._wait_until(lambda: self._has_unsynced or self._has_written)
                if self.error or not self._has_unsynced:
                    return
                upto = self._written
            began_s = time.perf_counter()
            self._writer.sync()
            self.syncs += 1
            self.sync_s += time.perf_counter() - began_s
            with self._changed:
                self.log.synced(upto)
                self._has_unsynced = self._written != upto
                self._changed.notify_all()
            self._answers.wake()

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        while not self._changed.wait_for(lambda: is_so() or self.error, LOOK_S):
            pass

    def _write(self, batch: Batch) -> bool:
        """Write, as often as the disk is full; whether it was written."""
        if batch.is_new:
            with self._changed:  # an older segment is whole before the next one exists
                self._wait_until(lambda: not self._has_unsynced)
        while not self.error:
            try:
                self._leave_room(batch)
                self._writer.write(batch)
            except OSError as error:
                if error.errno not in FULL_ERRORS:
                    raise
                self._tell_full(error)
                self._look()
                with self._changed:
                    if self._ends or (self._changed.wait(LOOK_S) and self._ends):
                        return False  # nobody was told of these records
            else:
                if self.is_full:
                    self.is_full = False
                    text = f"the log's disk has room again: shard {self.log.start.shard} goes on"
                    self._tell(logging.WARNING, "log_room", text)
                return True
        return False

    # ---- room --------------------------------------------------------------------------------------------------

    def _leave_room(self, batch: Batch) -> None:
        """Raise OSError where a snapshot would not fit any more; one that has been begun waits for older segments."""
        if batch.segment < self.log.segment or batch.is_new:
            return
        needed_bytes = self._reserved_bytes() + sum(record.size_bytes for record in batch.records)
        if self._disk.free_bytes() < needed_bytes:
            raise OSError(errno.ENOSPC, "no room is left but what a snapshot needs", str(self._disk))

    def _tell_full(self, error: OSError) -> None:
        if self.is_full:
            return
        text = (
            f"the log's disk is full ({error.strerror}: {error.filename}): shard {self.log.start.shard} acknowledges"
            " nothing until there is room; workers wait. A snapshot is tried, after which older segments go. Fix:"
            " delete other files on that disk, or make it larger"
        )
        with self._changed:
            self.is_full = True
            self._changed.notify_all()
        self._tell(logging.CRITICAL, "log_full", text)
        self._want_snapshot()

    def _look(self) -> None:
        """Once a second: whether the file is still there, and how much room."""
        now_s = time.monotonic()
        if now_s < self._looked_s + LOOK_S:
            return
        self._looked_s = now_s
        if self.log.is_empty and self._written == self.log.durable:
            self._writer.sync()
        self.free_bytes = free_bytes = self._disk.free_bytes()
        low_bytes = max(LOW_BYTES, 2 * self._reserved_bytes())
        if free_bytes >= low_bytes and not self.is_full:
            self._told_low_s = float("-inf")
        elif now_s >= self._told_low_s + LOW_REPEAT_S:
            self._told_low_s = now_s
            text = (
                f"the log's disk is almost full (expected {low_bytes >> 20} MiB of room, got {free_bytes >> 20}): once"
                " it is full, nothing is acknowledged. A snapshot is written now, after which older segments go"
            )
            self._tell(logging.ERROR, "log_low", text)
            self._want_snapshot()
