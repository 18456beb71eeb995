"""A barrier of processes that belongs to no candidate."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

CACHE_LINE_BYTES = 64
SLEEP_S = 50e-6


class Barrier:
    """Lets ranks go within a microsecond of each other.

    Each rank counts its arrivals in a cache line of its own; nothing else is exchanged, so the order in which
    processors make stores visible does not matter. The file has a line for each rank, all zeros at first.
    """

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        with path.open("r+b") as file:
            self._counters = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        stride = CACHE_LINE_BYTES // 8
        self._own = rank * stride
        self._others = [other * stride for other in range(world_size) if other != rank]
        self._shares_cores = world_size > len(os.sched_getaffinity(0))
        self._arrivals = 0

    def wait(self) -> None:
        """Meet asleep first: a rank that spun at once would keep a core from threads that finish another's work."""
        self._meet(lambda: time.sleep(SLEEP_S))
        self.spin()

    def spin(self) -> None:
        self._meet(os.sched_yield if self._shares_cores else lambda: None)

    def _meet(self, pause: Callable[[], object]) -> None:
        self._arrivals += 1
        self._counters[self._own] = self._arrivals
        for other in self._others:
            while self._counters[other] < self._arrivals:
                pause()
