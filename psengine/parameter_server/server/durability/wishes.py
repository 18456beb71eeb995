"""Who waits for a snapshot. All who ask while one is written share the next one.

    wish ─┐                    ┌─► wishes that came meanwhile ─► the next snapshot ─► one answer for all of them
    wish ─┴─► a snapshot ──────┘

So at most one snapshot is written and one waits, however many ask; each is answered by one that began after its wish.
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

# What is remembered of messages that ask stays bounded.
MAX_WISHES = 1024
_Wish = TypeVar("_Wish")


class SnapshotWishes(Generic[_Wish]):
    """Wishes that no snapshot has been begun for; thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[_Wish] = []
        self._has_ended = False

    def add(self, wish: _Wish, *, is_ours: bool = False) -> bool:
        """Have the next snapshot answer ``wish``; False where too many wait, or nobody writes any more.

        ``is_ours``: the server itself asks, and is never one too many.
        """
        with self._changed:
            if self._has_ended or (len(self._waiting) >= MAX_WISHES and not is_ours):
                return False
            self._waiting.append(wish)
            self._changed.notify()
            return True

    def take(self, timeout_s: float | None) -> list[_Wish] | None:
        """All that wait now, [] where none came within ``timeout_s``; None once it has ended and none is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._has_ended, timeout_s)
            taken, self._waiting = self._waiting, []
            return None if self._has_ended and not taken else taken

    def end(self) -> None:
        """Take no more wishes."""
        with self._changed:
            self._has_ended = True
            self._changed.notify()
