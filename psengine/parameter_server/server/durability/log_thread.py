"""The threads that write one shard's log.

    shard's thread   append ─ append ─ append ─ append ──────► goes on at once; the answers are held
    log thread             write ─── write ─── write ───►
    its sync thread              sync ─ wake ── sync ─ wake     each makes durable what was written before it

The shard's thread never waits for the disk. Writing, which copies to the page cache, goes on during a sync.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable

from psengine.parameter_server.server.log.disk import Disk
from psengine.parameter_server.server.log.log import Batch, LogStart, SegmentWriter, ShardLog
from psengine.parameter_server.server.log.records import Record
from psengine.parameter_server.server.transport.held_answers import HeldAnswers
from psengine.parameter_server.status_model import LogStatus

logger = logging.getLogger(__name__)

# Of the disk: below this much room people are told, and a snapshot is asked for, after which older segments go.
LOW_BYTES = 1 << 30
# How often a full disk is tried again, and the room is looked at; and the longest that anything waits to be woken.
LOOK_S = 1.0
_FULL = (errno.ENOSPC, errno.EDQUOT)


class LogThread(threading.Thread):
    """Writes a shard's log until ``end``. A disk that fails ends the shard; one that is full has it wait.

    Args:
        start: where to begin.
        answers: the shard's; woken with every sync.
        note: takes an event's kind and text.
        want_snapshot: called where older segments should go.
    """

    def __init__(
        self,
        disk: Disk,
        start: LogStart,
        answers: HeldAnswers,
        note: Callable[[str, str], None],
        want_snapshot: Callable[[], object],
    ) -> None:
        super().__init__(name=f"psengine-log-{start.shard}", daemon=True)
        self.log = ShardLog(start)
        self._disk = disk
        self._writer = SegmentWriter(disk, start.shard)
        self._answers = answers
        self._note = note
        self._want_snapshot = want_snapshot
        self._changed = threading.Condition()
        self._ends = False
        self._has_failed = False
        self._has_written = False  # all that ever will be
        self._written = start.first  # number after the last record that was written
        self._has_unsynced = False
        self._looked_s = 0.0
        self._is_low = False
        self.syncs = 0
        self.sync_s = 0.0
        self.is_full = False
        self.free_bytes: int | None = None  # when the room was looked at last
        self.error = ""

    # ---- in the shard's thread ---------------------------------------------------------------------------------

    def append(self, record: Record) -> int:
        """See ``ShardLog.append``."""
        with self._changed:
            number = self.log.append(record)
            self._changed.notify_all()
        return number

    def cut(self) -> tuple[int, int]:
        """Begin a segment: its number, and that of its first record."""
        with self._changed:
            segment = self.log.cut()
            self._changed.notify_all()
            return segment, self.log.end

    # ---- for other threads -------------------------------------------------------------------------------------

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
            records=log.end,
            durable_records=log.durable,
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
            self.error = f"the log of shard {self.log.start.shard} cannot be written any more: {error}"
            logger.critical(
                "%s. Nothing is acknowledged, and the server ends: what was not durable may be gone, so that a second"
                " try could lie. Look at the disk, then start the server again.",
                self.error,
                exc_info=not isinstance(error, OSError),
            )
            self._note("log_failed", self.error)
            self._answers.fail(self.error)
            with self._changed:
                self._ends = self._has_failed = True
                self._changed.notify_all()

    def _write_all(self) -> None:
        marked = -1
        while not self._has_failed:
            self._look_at_room()
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
                self._mark(marked)
                continue
            # An older segment is whole before the next one exists.
            if batch.is_new and not self._await_synced():
                return
            if not self._write(batch):
                return
            with self._changed:
                self._written = batch.upto
                self._has_unsynced = True
                self._changed.notify_all()

    def _await_synced(self) -> bool:
        """Wait until all that was written is durable; whether it is."""
        with self._changed:
            self._wait_until(lambda: self._has_failed or not self._has_unsynced)
            return not self._has_failed

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        while not self._changed.wait_for(is_so, LOOK_S):
            pass

    def _sync_all(self) -> None:
        while True:
            with self._changed:
                self._wait_until(lambda: self._has_unsynced or self._has_written or self._has_failed)
                if self._has_failed or not self._has_unsynced:
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

    def _mark(self, durable: int) -> None:
        try:
            self._writer.mark(durable)
        except OSError as error:
            if error.errno not in _FULL:
                raise

    def _write(self, batch: Batch) -> bool:
        """Write, as often as the disk is full; whether it was written."""
        while True:
            try:
                self._writer.write(batch)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                self._tell_full(error)
                self._look_at_room()
                with self._changed:
                    if self._changed.wait_for(lambda: self._ends, LOOK_S):
                        return False  # nobody was told of these records
            else:
                if self.is_full:
                    self.is_full = False
                    logger.warning("the log's disk has room again; shard %d goes on", self.log.start.shard)
                    self._note("log_room", f"the log's disk has room again: shard {self.log.start.shard} goes on")
                return True

    def _tell_full(self, error: OSError) -> None:
        if self.is_full:
            return
        self.is_full = True
        text = (
            f"the log's disk is full ({error.strerror}: {error.filename}): shard {self.log.start.shard} acknowledges"
            " nothing until there is room; workers wait. Fix: delete other files on that disk, or make it larger"
        )
        logger.critical("%s", text)
        self._note("log_full", text)

    def _look_at_room(self) -> None:
        now_s = time.monotonic()
        if now_s < self._looked_s + LOOK_S:
            return
        self._looked_s = now_s
        self.free_bytes = free_bytes = self._disk.free_bytes()
        was_low, self._is_low = self._is_low, free_bytes < LOW_BYTES
        if self._is_low and not was_low:
            text = (
                f"the log's disk is almost full (expected {LOW_BYTES >> 20} MiB of room, got {free_bytes >> 20}): once"
                " it is full, nothing is acknowledged. A snapshot is written now, after which older segments go"
            )
            logger.error("%s", text)
            self._note("log_low", text)
            self._want_snapshot()
