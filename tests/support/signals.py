"""Signals to other processes, and their effect."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def send_signal(process: int, number: int, timeout_s: float = 10.0) -> None:
    """Send ``number`` to a process; after SIGSTOP return once all of its threads have stopped, which on a busy machine
    they do only when it is their turn.

    Raises:
        AssertionError: it had not stopped after ``timeout_s``.
    """
    os.kill(process, number)
    if number != signal.SIGSTOP:
        return
    deadline_s = time.monotonic() + timeout_s
    while not _is_stopped(process):
        assert time.monotonic() < deadline_s, f"process {process} did not stop within {timeout_s:g} s"
        time.sleep(0.005)


def _is_stopped(process: int) -> bool:
    states = []
    for status in Path(f"/proc/{process}/task").glob("*/stat"):
        try:
            # Behind the name, which may hold anything.
            states.append(status.read_text().rpartition(")")[2].split()[0])
        except OSError:
            continue  # the thread has ended meanwhile
    return all(state in "TtZX" for state in states)
