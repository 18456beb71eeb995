"""The log of one shard, written over a simulated disk: ``LogThreads`` without threads.

shard   append ─ append ─ append ────────► answers held
here         write ── LONGEST_SYNC_S at most ── sync ─ release       write ── ...
"""

from __future__ import annotations

import random
from collections.abc import Callable

from psengine.parameter_server.server.log.disk import FULL_ERRORS
from psengine.parameter_server.server.log.log import ShardLog

LONGEST_SYNC_S = 0.05
RETRY_S = 1.0


class SimulatedLog:
    """Of one life of a shard.

    Args:
        fails: called where the log cannot be written any more: the server has to end.
    """

    def __init__(
        self,
        server,
        thread,
        log: ShardLog,
        rng: random.Random,
        fails: Callable[[], None],
    ) -> None:
        self.log = log
        self._server, self._thread, self._rng, self._fails = server, thread, rng, fails
        self._is_busy = False
        log.on_change = self._wake

    def follow(self) -> None:
        """Take what the shard does from here on."""
        self._thread.add_sink(self.log)

    def write_all(self) -> None:
        """Write at once what is there; OSError where that is not possible."""
        while self.log.has_unwritten:
            self.log.write()
            self.log.sync()

    def _wake(self) -> None:
        if not self._is_busy and self.log in self._thread.answers.sinks:
            self._is_busy = True
            self._server.clock.after(0.0, self._write)

    def _write(self) -> None:
        if not self._server.is_up:
            return
        if not self.log.has_unwritten:
            self._is_busy = False
            return
        try:
            self.log.write()
        except OSError as error:
            if error.errno not in FULL_ERRORS:
                self._fails()
                return
            self._server.clock.after(RETRY_S, self._write)
        else:
            self._server.clock.after(self._rng.random() ** 2 * LONGEST_SYNC_S, self._sync)

    def _sync(self) -> None:
        if not self._server.is_up:
            return
        if self._server.is_paused:
            self._server.clock.after(RETRY_S / 10, self._sync)
            return
        try:
            self.log.sync()
        except OSError:
            self._fails()
            return
        self._thread.release()
        self._write()
