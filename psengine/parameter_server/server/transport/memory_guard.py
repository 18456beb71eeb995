"""Notices that the process holds far more memory than its shards account for.

zmq limits the size of a frame, not the number of frames of a message, and shows a message only once it is complete. So
a peer that never ends one, or that asks and does not read, fills memory that no shard accounts for. Connections that
hold most (``connections.py``) are then cut. Honest clients reconnect and ask for what they miss.
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
    """Compares the process's memory, as the kernel has it, with what the shards account for.

    Args:
        allowance_bytes: what may be in flight between sockets and shards. More lets the process grow larger under
            attack, less cuts honest workers that send faster than the shards take.
        expected_bytes: asks the shards what may be resident beyond what was at the start; only called where the
            memory is suspiciously large.
    """

    def __init__(self, allowance_bytes: int, expected_bytes: Callable[[], int]) -> None:
        self._allowance_bytes = max(allowance_bytes, MIN_ALLOWANCE_BYTES)
        self._ask = expected_bytes
        self._expected_bytes = 0
        self._baseline_bytes = resident_bytes()
        # Each HELLO raises what is expected: never beyond what the machine has.
        self._most_bytes = int(MAX_SHARE_OF_MACHINE * machine_memory_bytes())
        self._next_s = 0.0

    def excess_bytes(self) -> int:
        """How much fills the memory that nothing accounts for; above 0 at most every ``PAUSE_S``."""
        if time.monotonic() < self._next_s or resident_bytes() <= self._limit_bytes():
            return 0
        self._expected_bytes = self._ask()
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)  # freed memory may not have been given back
        excess_bytes = resident_bytes() - self._limit_bytes()
        if excess_bytes > 0:
            self._next_s = time.monotonic() + PAUSE_S
        return max(0, excess_bytes)

    def _limit_bytes(self) -> int:
        return min(self._baseline_bytes + self._expected_bytes + self._allowance_bytes, self._most_bytes)


def resident_bytes() -> int:
    """Resident memory of this process alone, without what workers share with it; 0 where the system does not say."""
    try:
        _, resident, shared, *_ = map(int, _STATM.read_text().split())
        return (resident - shared) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0


def machine_memory_bytes() -> int:
    """What this machine, or the container, has."""
    limits = [_PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):
            continue  # absent, or "max"
    return min(limits)
