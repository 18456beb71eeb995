"""Notices that the process holds far more memory than its shards account for.

zmq limits the size of a frame, not the number of frames of a message, and shows a message only once it is complete: a
peer that never ends one fills the process's memory out of everybody's sight. So does one that asks and does not read.
``connections.py`` finds the connections with most in them, which are cut; where it finds none, all are. Honest clients
reconnect and ask for what they miss.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Snapshots copy what is accounted for; optimizers and averages need scratch space.
ACCOUNTED_FACTOR = 2.5
MAX_SHARE_OF_MACHINE = 0.95
# After a cut, memory takes a moment to come back.
PAUSE_S = 2.0
# Libraries load parts of themselves late.
MIN_ALLOWANCE_BYTES = 512 * 2**20


class MemoryGuard:
    """Compares what the kernel says with what the shards say.

    Args:
        allowance_bytes: what may be in flight between sockets and shards. More makes the process larger under attack,
            less cuts honest workers that send faster than the shards take.
        expected_bytes: asks the shards what may be resident beyond what was at the start; only called where the
            memory is suspiciously large.
    """

    def __init__(self, allowance_bytes: int, expected_bytes: Callable[[], int]) -> None:
        self.cuts = 0
        self._allowance_bytes = max(allowance_bytes, MIN_ALLOWANCE_BYTES)
        self._ask = expected_bytes
        self._expected_bytes = 0
        self._baseline_bytes = resident_bytes() or 0
        # Whoever says HELLO often enough is expected to send much: never more than there is.
        self._most_bytes = int(MAX_SHARE_OF_MACHINE * machine_memory_bytes())
        self._next_s = 0.0

    def excess_bytes(self) -> int:
        """How much fills the memory that nothing accounts for; above 0 at most every ``PAUSE_S``."""
        if time.monotonic() < self._next_s or not self._is_above():
            return 0
        self._expected_bytes = self._ask()
        _trim()  # what was freed may not have been given back
        resident = resident_bytes()
        if resident is None or resident <= self._limit_bytes():
            return 0
        self.cuts += 1
        self._next_s = time.monotonic() + PAUSE_S
        return resident - self._limit_bytes()

    def _is_above(self) -> bool:
        resident = resident_bytes()
        return resident is not None and resident > self._limit_bytes()

    def _limit_bytes(self) -> int:
        return min(self._baseline_bytes + self._expected_bytes + self._allowance_bytes, self._most_bytes)


def resident_bytes() -> int | None:
    """Resident memory of the process; None where the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return None


def machine_memory_bytes() -> int:
    """What this machine, or the container, has."""
    limits = [_PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):
            continue  # absent, or "max"
    return min(limits)


def _trim() -> None:
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
