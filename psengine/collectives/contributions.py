"""Sums of contributions over links: every rank sums a slice of each piece, for all.

::

    rank 0, of contributions 0 and 1   rows 1, 2 ── all-to-all ──► slice 0 of 0, 1, 2 ─ add ─► all-gather ──► row 0
    rank 1, of contribution 2          row 1     ── all-to-all ──► slice 1 of 0, 1, 2 ─ add ─► all-gather ──► row 0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from psengine.collectives.ring_order import add_in_ring_order

if TYPE_CHECKING:
    from psengine.collectives.base import Collective, Work

# A tensor travels in pieces, so that links are busy while slices are summed. A slice of a piece is one message between
# two ranks; of this size its own costs are small whatever the number of ranks.
SLICE_BYTES = 256 * 1024


class Piece:
    """A piece of the tensor that is summed.

    Args:
        collective: carries it.
        rows: the sum's and this rank's contributions, of all values.
        places: of the piece's values.
        owners: by contribution, its rank and its number there.
        what: its name in errors.
    """

    def __init__(
        self,
        collective: Collective,
        rows: Sequence[torch.Tensor],
        places: range,
        owners: Sequence[tuple[int, int]],
        what: str,
    ) -> None:
        self._collective = collective
        self._numel = rows[0].numel()
        self._total, *self._own = [row[places.start : places.stop] for row in rows]
        self._owners = owners
        self._what = what
        ranks = range(collective.world_size)
        part = -(-len(places) // len(ranks))
        self._sizes = [max(0, min(part, len(places) - rank * part)) for rank in ranks]
        self._own_first = places.start + collective.rank * part
        # Equal parts are gathered; the last ones of a tensor are shorter, or empty.
        is_whole = part * len(ranks) == len(places)
        self._gathered = self._total if is_whole else self._total.new_zeros(part * len(ranks))
        self._own_part = self._gathered[collective.rank * part :][:part]

    def trade(self) -> list[Work]:
        """Send each rank its slice of this rank's contributions, one after another."""
        collective = self._collective
        if collective.world_size == 1:
            self._addends = [self._own[number] for _, number in self._owners]
            return []
        works: list[Work] = []
        received: dict[tuple[int, int], torch.Tensor] = {}
        for number in range(1 + max(number for _, number in self._owners)):
            senders = sorted(rank for rank, other in self._owners if other == number)
            slices = self._total.new_empty(len(senders), self._sizes[collective.rank])
            flat = self._own[number] if number < len(self._own) else self._total[:0]
            works.append(collective.all_to_all(slices, flat, self._sizes, senders, what=self._what))
            received |= zip([(rank, number) for rank in senders], slices, strict=True)
        self._addends = [received[owner] for owner in self._owners]
        return works

    def gather_sums(self) -> Work:
        """Sum this rank's slice of what came, and gather the slices of all ranks."""
        own = self._own_part[: self._sizes[self._collective.rank]]
        add_in_ring_order(self._addends, own, self._own_first, self._numel)
        self._addends.clear()
        return self._collective.all_gather(self._gathered, self._own_part, what=self._what)

    def finish(self) -> None:
        """The sums are there."""
        if self._gathered is not self._total:
            self._total.copy_(self._gathered[: self._total.numel()])


def cut(collective: Collective, memory: torch.Tensor, owners: Sequence[tuple[int, int]], what: str) -> list[Piece]:
    """The pieces of ``Collective.sum_contributions``."""
    rows = (torch.view_as_real(memory).flatten(1) if memory.is_complex() else memory).unbind()
    assert len(rows) == 1 + sum(rank == collective.rank for rank, _ in owners), "a row for each own contribution"
    numel, piece_numel = rows[0].numel(), collective.world_size * (SLICE_BYTES // rows[0].element_size())
    places = range(numel)
    return [
        Piece(collective, rows, places[first : first + piece_numel], owners, what)
        for first in range(0, numel, piece_numel)
    ]
