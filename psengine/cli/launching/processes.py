"""The processes of a run, its workers' children too: found by a variable that each inherits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress

from torch.distributed.elastic.multiprocessing import SignalException

from psengine.environment.processes import has_exited
from psengine.environment.variables import RUN_ID

GRACE_S = 3.0


def is_forced(error: BaseException | None) -> bool:
    """Whether a second signal came while the workers were being ended because of a first one."""
    return isinstance(error, SignalException) and isinstance(error.__context__, SignalException)


def end_left_behind(mark: str, grace_s: float = GRACE_S) -> int:
    """End every process whose environment has ``PSENGINE_RUN_ID=mark``; return how many there were.

    Sends SIGTERM, and SIGKILL after ``grace_s`` or at a signal meanwhile. Finds none where there is no /proc.
    """
    remaining = _marked(mark)
    found = set(remaining)
    try:
        _signal(found, signal.SIGTERM)
        deadline_s = time.monotonic() + grace_s
        while remaining and time.monotonic() < deadline_s:
            time.sleep(0.05)
            remaining = _marked(mark)
    finally:
        for _ in range(100):  # a process that the kernel does not let go is given up after a second
            found.update(remaining := _marked(mark))
            # The kernel frees a process's memory, and the mark in it, before its files: its addresses are taken still.
            if all(map(has_exited, found)):
                break
            _signal(remaining, signal.SIGKILL)
            time.sleep(0.01)
    return len(found)


def _marked(mark: str) -> list[int]:
    needle = f"{RUN_ID}={mark}".encode()
    found = []
    for entry in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        with suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:  # another user's, or gone
            if needle in file.read().split(b"\0"):
                found.append(int(entry))
    return found


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
