"""When processes died, to the millisecond.

torchrun's agent looks every 0.1 s and notes whole seconds, which does not tell a rank that failed from a peer that
failed because of it.
"""

from __future__ import annotations

import os
import threading
import time

_SETTLE_S = 1.0


class DeathWatch:
    """Notes when children of this process end; leaves reaping them to whoever started them.

    Attributes:
        ended_s: process id to ``time.time()`` of its end.
        exit_codes: process id to its exit code, negative for a signal; lacks a process that was reaped at once.
    """

    def __init__(self) -> None:
        self.ended_s: dict[int, float] = {}
        self.exit_codes: dict[int, int] = {}
        self._threads: dict[int, threading.Thread] = {}

    def add(self, pid: int) -> None:
        """Watch a child."""
        self._threads[pid] = threading.Thread(target=self._wait, args=(pid,), name="psengine-death", daemon=True)
        self._threads[pid].start()

    def settle(self, pid: int) -> None:
        """Wait until the end of a process that has ended is noted."""
        self._threads[pid].join(_SETTLE_S)

    def _wait(self, pid: int) -> None:
        try:
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # reaped already
            end = None
        self.ended_s[pid] = time.time()
        if end is not None:
            self.exit_codes[pid] = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
