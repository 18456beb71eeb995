"""How long a merge waits for more than its quorum, from when workers arrived before. Pure; the time is given to it."""

from __future__ import annotations

import math
from collections.abc import Collection


class GraceWindow:
    """A window that opens when a quorum is there, and adapts to recent arrivals.

    It is ``share`` of the mean time between two arrivals of a worker, of those who are here, and is opened for workers
    who are expected within it: their last arrival, and their own time between two, tell when. It closes when all of
    them are here.

    Args:
        share: 0 never waits.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._last_s: dict[int, float] = {}
        self._interval_s: dict[int, float] = {}
        # The window that is open: when it ends, and for whom it waits.
        self._end_s = -math.inf
        self._awaited: frozenset[int] = frozenset()

    def arrived(self, rank: int, now_s: float) -> None:
        """A contribution of worker ``rank`` came."""
        last_s, self._last_s[rank] = self._last_s.get(rank), now_s
        if last_s is not None:
            passed_s = now_s - last_s
            # Half of it is the last one: a worker that has slowed down is known after two rounds.
            self._interval_s[rank] = (self._interval_s.get(rank, passed_s) + passed_s) / 2

    def open(self, present: Collection[int], absent: Collection[int], now_s: float) -> None:
        """A quorum is here."""
        known = [self._interval_s[rank] for rank in present if rank in self._interval_s]
        self._end_s = now_s + (self._share * sum(known) / len(known) if known else 0.0)
        self._awaited = frozenset(
            rank
            for rank in absent
            if rank in self._interval_s and self._last_s[rank] + self._interval_s[rank] <= self._end_s
        )

    def is_over(self, absent: Collection[int], now_s: float) -> bool:
        """Whether the merge goes on without those who are not here; ``absent``: of these, who may still come."""
        return now_s >= self._end_s or self._awaited.isdisjoint(absent)

    def forget(self, rank: int) -> None:
        """The worker is gone, or begins anew."""
        self._last_s.pop(rank, None)
        self._interval_s.pop(rank, None)
        self._awaited -= {rank}
