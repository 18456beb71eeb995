"""Workers that wait for another's state before they take part in an averaging job: who gives it, and who has it.

    joiner   JOIN ──► (not waited for) ──────────────────────── OK ─► PULL ... PUSH
    shard         STATE_WANTED ─► donor            ADMIT ──────┘
    donor                             STORE ... ───┘

JOIN comes again each second until it is answered, so that a donor that dies is replaced by another. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Admission:
    """A worker was let in."""

    incarnation: int  # of the worker
    admit: tuple[int, int]  # by which ADMIT: (donor's rank, id of the request)
    join: int | None = None  # the id of the JOIN that this answers; None: it is to come
    is_reading: bool = True  # it has not pushed yet, and may still be reading what was deposited for it


@dataclass
class Admissions:
    """See the module's text; ranks and ids of requests only."""

    # Neither ask for state nor take any while an earlier joiner may still be reading its own. With a quorum a donor
    # need not wait for that joiner, and would overwrite what it reads.
    one_at_a_time: bool = False
    _joins: dict[int, int] = field(default_factory=dict)
    _donors: dict[int, int] = field(default_factory=dict)
    _admitted: dict[int, _Admission] = field(default_factory=dict)

    def is_admitted(self, rank: int, incarnation: int, request: int) -> bool:
        """Whether this JOIN is answered already: its OK was lost, or ADMIT came before it."""
        admission = self._admitted.get(rank)
        if admission is None or admission.incarnation != incarnation:
            return False
        if admission.join is not None and request > admission.join:
            return False
        admission.join = max(request, admission.join or 0)
        return True

    def join(self, rank: int, request: int, live: Sequence[int]) -> int | None:
        """A worker waits for state; the rank to ask for it, None if it has to wait for its turn."""
        self._joins[rank] = max(request, self._joins.get(rank, 0))  # an older one may come late
        self.pushed(rank)
        if self.busy_with() is not None:
            return None
        # The same donor as long as it lives: two might deposit states of different steps.
        if self._donors.get(rank) not in live:
            self._donors[rank] = next(other for other in live if other != rank)
        return self._donors[rank]

    def admit(self, rank: int, incarnation: int, admit: tuple[int, int]) -> bool:
        """ADMIT, by (donor's rank, id of the request); False where it is a repetition."""
        admission = self._admitted.get(rank)
        if admission is not None and (admission.incarnation, admission.admit) == (incarnation, admit):
            return False
        self._admitted[rank] = _Admission(incarnation, admit)
        return True

    def answer(self, rank: int) -> int | None:
        """Id of the JOIN that an ADMIT answers; None if it is to come yet."""
        request = self._joins.pop(rank, None)
        self._donors.pop(rank, None)
        if request is not None:
            self._admitted[rank].join = request
        return request

    def pushed(self, rank: int) -> None:
        """A worker that pushes has read what was deposited for it."""
        if rank in self._admitted:
            self._admitted[rank].is_reading = False

    def busy_with(self) -> int | None:
        """The joiner that has to have read what was deposited for it before anything else is; None without one."""
        readers = (rank for rank, one in self._admitted.items() if one.is_reading)
        return next(readers, None) if self.one_at_a_time else None

    def is_reading(self, rank: int) -> bool:
        """Whether this worker was let in, and may still be reading what was deposited for it."""
        return rank in self._admitted and self._admitted[rank].is_reading

    def unread_from(self, donor: int) -> list[int]:
        """Workers that this one let in, and that have not pushed yet."""
        return sorted(rank for rank, one in self._admitted.items() if one.is_reading and one.admit[0] == donor)

    def forget(self, rank: int) -> None:
        """The worker is gone, or has to join anew."""
        for table in (self._joins, self._donors, self._admitted):
            table.pop(rank, None)
