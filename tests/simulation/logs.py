"""The log of one shard, written over a simulated disk: ``LogThread`` without its threads.

shard   append ─ append ─ append ────────► answers held
here         write ── LONGEST_SYNC_S at most ── sync ─ release       write ── ...
"""

from __future__ import annotations

import errno
import json
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from psengine.parameter_server.server.log.log import Batch, LogStart, Place, SegmentWriter, ShardLog
from psengine.parameter_server.server.log.records import Record, RecordKind
from simulation.disk import SimulatedDisk

if TYPE_CHECKING:
    from simulation.server import ServerProcess, SimulatedThread

LONGEST_SYNC_S = 0.05
RETRY_S = 1.0


class SimulatedLog:
    """Of one life of a shard.

    Args:
        fails: called where the log cannot be written any more: the server has to end.
    """

    def __init__(
        self,
        server: ServerProcess,
        thread: SimulatedThread,
        disk: SimulatedDisk,
        start: LogStart,
        rng: random.Random,
        fails: Callable[[], None],
    ) -> None:
        self.log = ShardLog(start)
        self._server, self._thread, self._rng, self._fails = server, thread, rng, fails
        self._writer = SegmentWriter(disk, start.shard)
        self._is_busy = False

    def follow(self) -> None:
        """Take what the shard does from here on."""
        self._thread.answers.log = self.log
        self._thread.shard.append = self._append
        if self._thread.coordinators is not None:
            self._thread.append_coordinator = self._append_coordinator

    def _append(self, record: Record) -> int:
        """See ``ShardLog.append``."""
        number = self.log.append(record)
        self._wake()
        return number

    def _append_coordinator(self, meta: Any) -> int:
        return self._append(Record(RecordKind.COORDINATOR, frames=[json.dumps(meta).encode()]))

    def cut(self) -> Place:
        """See ``ShardLog.cut``."""
        place = self.log.cut()
        self._wake()
        return place

    def has_begun(self, segment: int) -> bool:
        """Whether this segment's beginning is on the disk."""
        return self._writer.begun >= segment

    def write_all(self) -> None:
        """Write at once what is there; OSError where that is not possible."""
        while (batch := self.log.pending()) is not None:
            self._writer.write(batch)
            self._writer.sync()
            self.log.synced(batch.upto)

    def _wake(self) -> None:
        if not self._is_busy and self._thread.answers.log is not None:
            self._is_busy = True
            self._server.clock.after(0.0, self._next)

    def _next(self) -> None:
        batch = self.log.pending() if self._server.is_up else None
        if batch is None:
            self._is_busy = False
        else:
            self._write(batch)

    def _write(self, batch: Batch) -> None:
        if not self._server.is_up:
            return
        try:
            self._writer.write(batch)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                self._fails()
                return
            self._server.clock.after(RETRY_S, self._write, batch)
        else:
            self._server.clock.after(self._rng.random() ** 2 * LONGEST_SYNC_S, self._sync, batch)

    def _sync(self, batch: Batch) -> None:
        if not self._server.is_up:
            return
        if self._server.is_paused:
            self._server.clock.after(RETRY_S / 10, self._sync, batch)
            return
        try:
            self._writer.sync()
            self.log.synced(batch.upto)
            self._thread.release()
            if self.log.is_empty:
                self._writer.mark(batch.upto)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                self._fails()
                return
        self._next()
