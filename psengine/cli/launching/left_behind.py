"""Processes that workers started and left behind: found by a mark in their environment, which children inherit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

MARK = "PSENGINE_RUN_ID"
GRACE_S = 3.0


def find_left_behind(mark: str) -> list[int]:
    """Process ids whose environment has ``PSENGINE_RUN_ID=mark``, wherever they went; [] where there is no /proc."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for entry in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                if needle in file.read().split(b"\0"):
                    found.append(int(entry))
        except OSError:
            continue  # another user's, or gone
    return found


def end_left_behind(mark: str, *, grace_s: float = GRACE_S, is_forced: Callable[[], bool] = lambda: False) -> int:
    """End what workers left behind, first in order, then by force; how many there were.

    Args:
        mark: see ``find_left_behind``.
        grace_s: between the signal that asks and the one that does not.
        is_forced: whether there is no time for that.
    """
    first = find_left_behind(mark)
    _signal(first, signal.SIGTERM)
    deadline_s = time.monotonic() + grace_s
    remaining = first
    while remaining and not is_forced() and time.monotonic() < deadline_s:
        time.sleep(0.05)
        remaining = find_left_behind(mark)
    _signal(remaining, signal.SIGKILL)
    return len(first)


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
