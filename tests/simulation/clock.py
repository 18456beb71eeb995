"""Simulated time: a heap of (time, number, call), and the digest of everything that happened."""

from __future__ import annotations

import hashlib
import heapq
import struct
from collections.abc import Callable
from typing import Any

from psengine.protocol.frames import decode

_PLACE = struct.Struct("<d2q")
# Of a message's header; the size of its body follows.
_DIGESTED_BYTES = 72


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
        now_s = self.now_s
        heapq.heappush(self._heap, (time_s if time_s > now_s else now_s, self._count, function, arguments))

    def after(self, delay_s: float, function: Callable[..., None], *arguments: Any) -> None:
        """Call ``function(*arguments)`` once ``delay_s`` have passed."""
        self._count += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._count, function, arguments))

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
        """Something happened: it becomes part of the digest. ``parts`` have a stable ``repr``."""
        self._digest.update(repr((self.now_s, what, parts)).encode())
        if self.trace is not None:
            shown = " ".join(str(part) for part in parts if not isinstance(part, bytes))
            self.trace.append(f"{self.now_s:9.4f} {what} {shown}")

    def note_message(self, what: str, place: tuple[int, int], frames: list[bytes]) -> None:
        """A message was sent or arrived at ``place``. Part of the digest: its header, all but the size of its body.

        A HELLO's process id is in the body, and differs from run to run.
        """
        self._digest.update(_PLACE.pack(self.now_s, *place))
        self._digest.update(frames[0][:_DIGESTED_BYTES])
        if self.trace is not None:
            message = decode(frames)
            shown = message.worker, message.incarnation, message.key, message.sequence, message.version
            self.trace.append(f"{self.now_s:9.4f} {what} {place[0]} {place[1]} {message.type.name} {shown}")

    @property
    def digest(self) -> str:
        """Equal for two runs in which the same happened."""
        return self._digest.hexdigest()
