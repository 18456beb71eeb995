"""The memory of a chunk's answers: where they are made, and who still reads them.

    rule      free() ─► place ◄─ values ─ answer: Reply.place
    reader    a buffer that a socket sends, a worker of this host: hold() the place, for as long as they live

Nothing else on the server knows when such memory may be written again; ``transport/segments.py`` lends the places.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence

import torch

from psengine.parameter_server.segment import Segment


class Place:
    """One tensor's memory, which does not change while somebody holds it.

    Args:
        values: 1-D, the memory.
        segment: that workers of this host read it in; None where it is no part of one.
        offset: where it begins there.
    """

    __slots__ = ("_holders", "offset", "segment", "values")

    def __init__(self, values: torch.Tensor, segment: Segment | None = None, offset: int = 0) -> None:
        self.values = values
        self.segment = segment
        self.offset = offset
        self._holders: list[weakref.ref[object]] = []

    def hold(self, holder: object) -> None:
        """The memory is read for as long as ``holder`` lives; zmq references a buffer until its bytes have left."""
        self._holders = [reference for reference in self._holders if reference() is not None]
        self._holders.append(weakref.ref(holder))

    @property
    def is_held(self) -> bool:
        """Whether somebody reads the memory."""
        return any(reference() is not None for reference in self._holders)


class AnswerMemory:
    """Where the answers of one chunk are made.

    Args:
        numel, dtype: of an answer that is not encoded.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self._numel = numel
        self._dtype = dtype
        self._lent: Sequence[Place] = ()

    def lend(self, places: Sequence[Place]) -> None:
        """From now on make answers in one of these, whichever nobody reads."""
        self._lent = places

    def free(self, kept: Collection[Place] = ()) -> Place:
        """A place that nobody reads and that is not ``kept``, uninitialised."""
        for place in self._lent:
            if not place.is_held and all(place is not one for one in kept):
                return place
        return self.new()

    def new(self) -> Place:
        """A place of its own, uninitialised."""
        return Place(torch.empty(self._numel, dtype=self._dtype))

    def next_of(self, current: Place) -> Place:
        """Where the values after those in ``current`` are written: over them, unless they are being read."""
        if not current.is_held and (not self._lent or current.segment is self.segment):
            return current
        place = self.free()
        return place if current.is_held or place.segment is not None else current

    @property
    def segment(self) -> Segment | None:
        """Where workers of this host read; None where answers travel."""
        return self._lent[0].segment if self._lent else None

    @property
    def extra_bytes(self) -> int:
        """Memory of the places beyond one."""
        return max(0, len(self._lent) - 1) * self._numel * self._dtype.itemsize
