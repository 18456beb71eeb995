"""How far this worker is at one shard, for a server that restarts: nobody else knows it. Pure.

    push 1 ─ answer   push 2 ─ answer   push 3 ─ answer   push 4 ─   the server dies; its snapshot has pushes 1 and 2
    └──────────── acknowledged: 3, version 3 ──────────┘  in flight

A server that comes back from a snapshot counts the acknowledged updates that it lost (``core/server_weights.py``). A
server that averages lost its averages, which the workers have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# An entry has at most 28 bytes in msgpack, and a body has room for 64 KiB.
_PAGE_CHUNKS = 1700


@dataclass(slots=True)
class _Known:
    """The progress of this worker in one chunk.

    Attributes:
        version: the highest that came in this life of the server.
        sequence: the last exchange that was answered.
    """

    version: int = 0
    sequence: int = 0


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

    def answered(self, key: int, sequence: int, version: int) -> None:
        """An exchange was answered."""
        known = self._known(key)
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
            known.version = 0

    def to_bodies(self) -> list[dict[str, Any]]:
        """Bodies of PROGRESS."""
        entries = [[key, known.version, known.sequence] for key, known in tuple(self._chunks.items())]
        pages = [entries[start : start + _PAGE_CHUNKS] for start in range(0, len(entries), _PAGE_CHUNKS)] or [[]]
        kept = {"durability": self.durability, "durable_version": self.durable_version}
        return [{"chunks": page, "more": page is not pages[-1], **kept} for page in pages]
