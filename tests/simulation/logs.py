"""The log of one shard, written over a simulated disk: ``LogThread`` without its thread.

shard   append ─ append ─ append ────────► answers held
here         write ── LONGEST_SYNC_S at most ── sync ─ release       write ── ...
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from psengine.parameter_server.server.core.shard import Shard
from psengine.parameter_server.server.log.log import Batch, LogStart, SegmentWriter, ShardLog
from psengine.parameter_server.server.log.records import Record
from psengine.parameter_server.server.transport.held_answers import HeldAnswers
from simulation.clock import Clock
from simulation.disk import SimulatedDisk

if TYPE_CHECKING:
    from simulation.server import ServerProcess

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
        shard: Shard,
        answers: HeldAnswers,
        disk: SimulatedDisk,
        start: LogStart,
        rng: random.Random,
        fails: Callable[[], None],
    ) -> None:
        self.log = ShardLog(start)
        self._server, self._answers, self._rng, self._fails = server, answers, rng, fails
        self._writer = SegmentWriter(disk, start.shard)
        self._is_busy = False
        answers.log = self.log
        shard.jobs.journal.append = self.append

    @property
    def _clock(self) -> Clock:
        return self._server.clock

    def append(self, record: Record) -> int:
        """See ``ShardLog.append``."""
        number = self.log.append(record)
        self._wake()
        return number

    def cut(self) -> tuple[int, int]:
        """See ``LogThread.cut``."""
        segment = self.log.cut()
        self._wake()
        return segment, self.log.end

    def _wake(self) -> None:
        if not self._is_busy:
            self._is_busy = True
            self._clock.after(0.0, self._next)

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
            self._clock.after(RETRY_S, self._write, batch)
        else:
            self._clock.after(self._rng.random() ** 2 * LONGEST_SYNC_S, self._sync, batch)

    def _sync(self, batch: Batch) -> None:
        if not self._server.is_up:
            return
        if self._server.is_paused:
            self._clock.after(RETRY_S / 10, self._sync, batch)
            return
        try:
            self._writer.sync()
            self.log.synced(batch.upto)
            self._answers.release()
            if self.log.pending_bytes == 0:
                self._writer.mark(batch.upto)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                self._fails()
                return
        self._next()
