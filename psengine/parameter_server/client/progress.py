"""How far this worker is at one shard, for a server that restarts: nobody else knows it. Pure.

    push 1 ─ answer   push 2 ─ answer   push 3 ─ answer   push 4 ─   the server dies; its snapshot has pushes 1 and 2
    └──────────── acknowledged: 3, version 3 ──────────┘  in flight

A server that comes back from a snapshot counts the acknowledged updates that it lost (``core/weights_here.py``). A
server that averages lost its averages, which the workers have.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

# Of one chunk's unused exchanges; where there are more, the oldest are forgotten.
MAX_RUNS = 16
# msgpack needs at most this much for an integer, and a body has room for 64 KiB.
_INTEGER_BYTES = 9
_PAGE_BYTES = 48 * 1024


@dataclass(slots=True)
class _Known:
    """The progress of this worker in one chunk.

    Attributes:
        version: the highest that came in this life of the server.
        sequence: the last exchange that was answered.
        unused: runs [first, last] of exchanges up to ``sequence`` that did not change the chunk as far as this worker
            knows: refused, never answered, or lost and counted.
        asked_version: ``version`` when the exchange in flight was sent.
    """

    version: int = 0
    sequence: int = 0
    unused: list[tuple[int, int]] = field(default_factory=list)
    asked_version: int = 0

    def skip(self, first: int, last: int) -> None:
        if first > last:
            return
        if self.unused and self.unused[-1][1] >= first - 1:
            first = self.unused.pop()[0]
        self.unused.append((first, last))
        del self.unused[:-MAX_RUNS]


class Ledger:
    """The exchanges that a shard acknowledged, by chunk. Used by the I/O thread, read while everything is held.

    Attributes:
        epoch: the life of the server that acknowledged it; 0 before this worker takes part.
        epochs: the lives of the server that have said WELCOME to this worker, and 0.
        durability: what the server kept through its end in that life, as WELCOME says it.
        durable_version: the newest version of the job that it said was on its disk.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.epochs = {0}
        self.durability = self._offered = "memory"
        self.durable_version = 0
        self._chunks: dict[int, _Known] = {}

    def sent(self, key: int) -> None:
        """An exchange leaves for the first time."""
        known = self._known(key)
        known.asked_version = known.version

    def answered(self, key: int, sequence: int, version: int, *, is_used: bool) -> None:
        """An exchange was answered; with ``is_used`` the server has applied or averaged it."""
        known = self._known(key)
        known.skip(known.sequence + 1, sequence - 1 if is_used else sequence)
        known.sequence = max(known.sequence, sequence)
        known.version = max(known.version, version)

    def saw(self, key: int, version: int) -> None:
        """The chunk was read, or overwritten."""
        known = self._known(key)
        known.version = max(known.version, version)

    def _known(self, key: int) -> _Known:
        known = self._chunks.get(key)
        if known is None:
            known = self._chunks[key] = _Known()
        return known

    def forget(self) -> None:
        """Start anew from another worker's state, whose exchanges have other numbers."""
        self._chunks.clear()

    @property
    def has_answers(self) -> bool:
        """Whether an exchange was answered."""
        return any(known.sequence for known in tuple(self._chunks.values()))

    @property
    def reached(self) -> int | None:
        """The last exchange that was answered of every chunk; None before the first one with this state."""
        return min((known.sequence for known in tuple(self._chunks.values())), default=None)

    def welcomed(self, epoch: int, durability: str) -> None:
        """A life of the server says WELCOME, and keeps like this what it acknowledges; it may say "wait"."""
        self._offered = durability
        self.epochs.add(epoch)

    def settle(self, epoch: int) -> None:
        """The server has counted its losses, or there were none yet: begin anew for its life ``epoch``."""
        self.epoch, self.durability = epoch, self._offered
        for known in self._chunks.values():
            known.unused, known.version, known.asked_version = [], 0, 0
            known.skip(1, known.sequence)

    def to_bodies(self, under_way: Iterable[int]) -> list[dict[str, Any]]:
        """Bodies of PROGRESS; ``under_way``: the chunks that have an exchange which was sent."""
        sent = frozenset(under_way)
        pages: list[list[list[int]]] = [[]]
        size_bytes = 0
        for key, known in tuple(self._chunks.items()):
            entry = [key, known.version, known.sequence, known.asked_version + 1 if key in sent else 0]
            entry.extend(number for run in known.unused for number in run)
            size_bytes += _INTEGER_BYTES * (len(entry) + 1)
            if size_bytes > _PAGE_BYTES and pages[-1]:
                pages.append([])
                size_bytes = 0
            pages[-1].append(entry)
        kept = {"durability": self.durability, "durable_version": self.durable_version}
        return [{"chunks": page, "more": page is not pages[-1], **kept} for page in pages]
