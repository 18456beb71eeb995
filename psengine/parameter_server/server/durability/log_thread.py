"""The threads that write one shard's log.

    shard's thread   append ─ append ─ append ─ append ──────► goes on at once; the answers are held
    writer                 write ─── write ─── write ───►
    syncer                       sync ─ wake ── sync ─ wake     each makes durable what was written before it

The shard's thread never waits for the disk. Writing, which copies to the page cache, goes on during a sync.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from psengine.errors import SnapshotError
from psengine.parameter_server.server.log.disk import FULL_ERRORS
from psengine.parameter_server.server.log.log import ShardLog
from psengine.parameter_server.server.transport.shard_thread import HeldAnswers
from psengine.status_port.status_model import LogStatus

# How often a full disk is tried again, and an idle log's file is looked for; the longest wait, too.
LOOK_S = 1.0


class LogThreads:
    """Write a shard's log until ``end``. A disk that fails ends the shard; one that is full has it wait.

    Args:
        log: written and synced by nobody else.
        answers: the shard's; woken with every sync.
        note: takes an event's kind and text.
        room_bytes: how much of the disk may be filled.
    """

    def __init__(
        self, log: ShardLog, answers: HeldAnswers, note: Callable[[str, str], None], room_bytes: Callable[[], int]
    ) -> None:
        self.log = log
        log.on_change = self._tell_threads
        self._answers, self._note, self._room_bytes = answers, note, room_bytes
        self._changed = threading.Condition()
        self._ends = False
        self._told = log.durable  # what the shard was woken for
        self._syncs, self._sync_s = 0, 0.0
        self.is_full = False
        name = f"psengine-log-{log.shard}"
        self._threads = [
            threading.Thread(target=self._guarded, args=[loop], name=name, daemon=True)
            for loop in (self._write_all, self._sync_all)
        ]
        for thread in self._threads:
            thread.start()

    # ---- for other threads -------------------------------------------------------------------------------------

    def await_begun(self, segment: int, deadline_s: float) -> None:
        """Wait until a segment is on the disk, with its beginning.

        Raises:
            SnapshotError: it is not there within ``deadline_s``, or never will be.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.log.begun >= segment or self.log.failure, deadline_s)
        if self.log.begun < segment:
            why = self.log.failure or ("its disk is full" if self.is_full else f"it did not in {deadline_s:g} s")
            raise SnapshotError(f"the log of shard {self.log.shard} cannot begin segment {segment}: {why}")

    def end(self, deadline_s: float) -> None:
        """Write what is there, then end."""
        self._ends = True
        for thread in self._threads:
            self._tell_threads()
            thread.join(deadline_s)
        if not any(thread.is_alive() for thread in self._threads):
            self.log.close()

    def status(self, free_bytes: int | None) -> LogStatus:
        """How far it is, on a disk with so much room."""
        return LogStatus(
            shard=self.log.shard,
            waiting_records=self.log.end - self.log.durable,
            written_bytes=self.log.written_bytes,
            syncs=self._syncs,
            sync_seconds=round(self._sync_s, 3),
            is_full=self.is_full,
            free_bytes=free_bytes,
        )

    # ---- in its threads ----------------------------------------------------------------------------------------

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as error:
            self.log.failure = f"the log of shard {self.log.shard} cannot be written any more: {error}"
            self._note(
                "log_failed",
                f"{self.log.failure}. Nothing is acknowledged, and the server ends: what was not durable may be gone,"
                " so that a second try could lie. Look at the disk, then start the server again",
            )
            self._tell_threads()
            self._answers.wake()

    def _write_all(self) -> None:
        while not self.log.failure:
            self._write()
            with self._changed:
                self._changed.notify_all()
                if self.is_full or not self.log.has_unwritten:
                    if self._ends:
                        return  # where the disk is full, nobody was told of the rest
                    self._changed.wait(LOOK_S)

    def _sync_all(self) -> None:
        log = self.log
        while not log.failure:
            with self._changed:
                self._changed.wait_for(lambda: log.written != self._told or self._ends or log.failure, LOOK_S)
            if log.written == self._told and not self._threads[0].is_alive():
                return
            began_s = time.perf_counter()
            log.sync()
            if log.durable != self._told:
                self._told = log.durable
                self._syncs += 1
                self._sync_s += time.perf_counter() - began_s
                self._tell_threads()
                self._answers.wake()

    def _write(self) -> None:
        try:
            self.log.write(self._room_bytes())
        except OSError as error:
            if error.errno not in FULL_ERRORS:
                raise
            if not self.is_full:
                self.is_full = True
                self._note(
                    "log_full",
                    f"the log's disk is full ({error.strerror}: {error.filename}): shard {self.log.shard} acknowledges"
                    " nothing until there is room; workers wait. A snapshot is tried, after which older segments go."
                    " Fix: delete other files on that disk, or make it larger",
                )
        else:
            if self.is_full:
                self.is_full = False
                self._note("log_room", f"the log's disk has room again: shard {self.log.shard} goes on")

    def _tell_threads(self) -> None:
        with self._changed:
            self._changed.notify_all()
