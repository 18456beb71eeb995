"""Processes that workers started and left behind, found by a mark in their environment, which children inherit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

MARK = "PSENGINE_RUN_ID"
GRACE_S = 3.0


def find_left_behind(mark: str) -> list[int]:
    """Process ids whose environment has ``PSENGINE_RUN_ID=mark``; [] where there is no /proc."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for entry in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        with suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:  # another user's, or gone
            if needle in file.read().split(b"\0"):
                found.append(int(entry))
    return found


def end_left_behind(mark: str, is_forced: Callable[[], bool]) -> int:
    """Send SIGTERM to what workers left behind, SIGKILL after ``GRACE_S`` or once ``is_forced``; return how many."""
    first = remaining = find_left_behind(mark)
    _signal(first, signal.SIGTERM)
    deadline_s = time.monotonic() + GRACE_S
    while remaining and not is_forced() and time.monotonic() < deadline_s:
        time.sleep(0.05)
        remaining = find_left_behind(mark)
    _signal(remaining, signal.SIGKILL)
    return len(first)


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
