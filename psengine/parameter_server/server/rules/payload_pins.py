"""Memory that is on its way out: sent without a copy, it must not change until it has left."""

from __future__ import annotations

import weakref


class PayloadPins:
    """Which buffers over one tensor's memory the sockets still hold.

    zmq references each buffer that it sends without a copy until its bytes have left, so a weak reference tells.
    """

    def __init__(self) -> None:
        self._buffers: list[weakref.ref[memoryview]] = []

    def pin(self, buffer: memoryview) -> None:
        """A socket has taken ``buffer``."""
        self._buffers = [reference for reference in self._buffers if reference() is not None]
        self._buffers.append(weakref.ref(buffer))

    def are_held(self) -> bool:
        """Whether some socket still reads the memory."""
        return any(reference() is not None for reference in self._buffers)
