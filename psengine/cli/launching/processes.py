"""The workers' processes: when each ended, their process groups, and what they leave behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

# In the environment of every worker; its children inherit it.
MARK = "PSENGINE_RUN_ID"
GRACE_S = 3.0
_SETTLE_S = 1.0


class DeathWatch:
    """Notes to the millisecond when children of this process end; leaves reaping them to whoever started them.

    torchrun's agent looks every 0.1 s and notes whole seconds, which does not tell a rank that failed from a peer that
    failed because of it.

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
        end = None
        with suppress(ChildProcessError):  # reaped already
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        self.ended_s[pid] = time.time()
        if end is not None:
            self.exit_codes[pid] = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def kill_group(leader: int, number: int) -> None:
    """Send a signal to the process group of ``leader``, if there is one."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def end_left_behind(mark: str, is_forced: Callable[[], bool]) -> int:
    """End the processes that workers started and left behind; return how many there were.

    Sends SIGTERM to every process whose environment has ``PSENGINE_RUN_ID=mark``, and SIGKILL after ``GRACE_S`` or once
    ``is_forced``. Finds none where there is no /proc.
    """
    found = remaining = _marked(mark)
    _signal(found, signal.SIGTERM)
    deadline_s = time.monotonic() + GRACE_S
    while remaining and not is_forced() and time.monotonic() < deadline_s:
        time.sleep(0.05)
        remaining = _marked(mark)
    _signal(remaining, signal.SIGKILL)
    return len(found)


def _marked(mark: str) -> list[int]:
    needle = f"{MARK}={mark}".encode()
    found = []
    for entry in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        with suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:  # another user's, or gone
            if needle in file.read().split(b"\0"):
                found.append(int(entry))
    return found


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
