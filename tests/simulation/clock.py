"""Simulated time: a heap of (time, number, call), and the digest of everything that happened."""

from __future__ import annotations

import hashlib
import heapq
import struct
from collections.abc import Callable
from typing import Any

_TIME = struct.Struct("<d")


class Clock:
    """Calls functions in the order of their times; equal times in the order in which they were scheduled.

    Attributes:
        now_s: the simulated time.
        events: how many calls were made.
        trace: None, or a list that gets a line for each event, for people.
    """

    def __init__(self, *, traces: bool = False) -> None:
        self.now_s = 0.0
        self.events = 0
        self.trace: list[str] | None = [] if traces else None
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._digest = hashlib.blake2b(digest_size=16)

    def at(self, time_s: float, function: Callable[..., None], *arguments: Any) -> None:
        """Call ``function(*arguments)`` at ``time_s``, or now where that has passed."""
        self._count += 1
        heapq.heappush(self._heap, (max(time_s, self.now_s), self._count, function, arguments))

    def after(self, delay_s: float, function: Callable[..., None], *arguments: Any) -> None:
        """Call ``function(*arguments)`` once ``delay_s`` have passed."""
        self.at(self.now_s + delay_s, function, *arguments)

    def run(self, until_s: float, is_over: Callable[[], bool]) -> bool:
        """Let time pass; whether ``is_over`` became true before ``until_s``."""
        heap = self._heap
        while not is_over():
            if not heap or heap[0][0] > until_s:
                return False
            self.now_s, _, function, arguments = heapq.heappop(heap)
            self.events += 1
            function(*arguments)
        return True

    def note(self, what: str, *parts: Any) -> None:
        """Something happened: it becomes part of the digest. ``parts`` are bytes, or have a stable ``str``."""
        digest = self._digest
        digest.update(_TIME.pack(self.now_s))
        digest.update(what.encode())
        for part in parts:
            digest.update(part if isinstance(part, bytes) else str(part).encode())
        if self.trace is not None:
            shown = " ".join(str(part) for part in parts if not isinstance(part, bytes))
            self.trace.append(f"{self.now_s:9.4f} {what} {shown}")

    @property
    def digest(self) -> str:
        """Equal for two runs in which the same happened."""
        return self._digest.hexdigest()
