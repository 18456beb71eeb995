"""The memory of a chunk's answers: where they are made, and who still reads them.

    rule      free() ─► place ◄─ values ─ answer: Reply.place
    socket    sends the place without a copy    sent(buffer): until its bytes have left
    worker    of this host reads the place      readers: until it has left the place

Nothing else on the server knows when such memory may be written again; ``transport/segments.py`` lends the places.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence

import torch


class Place:
    """One tensor's memory, which does not change while somebody reads it.

    zmq references each buffer that it sends without a copy until its bytes have left, so a weak reference tells.

    Args:
        values: 1-D, the memory.
        number: its number among the chunk's places that workers of this host read.
        lender: the memory that it is part of there; None where it is no part of any.

    Attributes:
        readers: how many workers of this host were told of the place, and have not left it.
    """

    __slots__ = ("_buffers", "lender", "number", "readers", "values")

    def __init__(self, values: torch.Tensor, number: int = 0, lender: object = None) -> None:
        self.values = values
        self.number = number
        self.lender = lender
        self.readers = 0
        self._buffers: list[weakref.ref[memoryview]] = []

    def sent(self, buffer: memoryview) -> None:
        """A socket has taken ``buffer``, which is this memory."""
        self._buffers = [reference for reference in self._buffers if reference() is not None]
        self._buffers.append(weakref.ref(buffer))

    def is_read(self) -> bool:
        """Whether some socket or worker still reads the memory."""
        return self.readers > 0 or any(reference() is not None for reference in self._buffers)


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
            if not place.is_read() and all(place is not one for one in kept):
                return place
        return self.new()

    def new(self) -> Place:
        """A place of its own, uninitialised."""
        return Place(torch.empty(self._numel, dtype=self._dtype))

    def next_of(self, current: Place) -> Place:
        """Where the values after those in ``current`` are written: over them, unless they are being read."""
        is_read = current.is_read()
        if is_read or (self._lent and all(one is not current for one in self._lent)):
            place = self.free()
            return place if is_read or place.lender is not None else current
        return current

    @property
    def extra_bytes(self) -> int:
        """Memory of the places beyond one."""
        return max(0, len(self._lent) - 1) * self._numel * self._dtype.itemsize
