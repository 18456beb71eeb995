"""How many connections and requests the status port takes at once, so that /healthz is always answered.

connection ── ConnectionSlots: 64; one that has not asked yet makes room for a newcomer
  request  ── RequestPlaces: 8 at work, 24 wait; the others hear that the port is busy. /healthz needs no place
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

MAX_CONNECTIONS = 64
MAX_REQUESTS = 8
MAX_WAITING = 24
WAIT_S = 2.0


class ConnectionSlots:
    """Connections that are served at once; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Whether its request is complete; the oldest connection first.
        self._has_asked: dict[socket.socket, bool] = {}

    def take(self, connection: socket.socket) -> bool:
        """A slot, if need be that of the connection that was silent the longest; False where all others have asked."""
        with self._lock:
            if len(self._has_asked) >= MAX_CONNECTIONS:
                silent = next((other for other, has_asked in self._has_asked.items() if not has_asked), None)
                if silent is None:
                    return False
                del self._has_asked[silent]
                cut(silent)  # its thread reads the end, and ends
            self._has_asked[connection] = False
            return True

    def asked(self, connection: socket.socket) -> None:
        """The request of a connection is complete, or is no request."""
        with self._lock:
            if connection in self._has_asked:
                self._has_asked[connection] = True

    def release(self, connection: socket.socket) -> None:
        """A connection is served, or was cut."""
        with self._lock:
            self._has_asked.pop(connection, None)


class RequestPlaces:
    """Requests that are worked on at once."""

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(MAX_REQUESTS)
        self._waiting = threading.BoundedSemaphore(MAX_WAITING)

    @contextlib.contextmanager
    def take(self) -> Iterator[bool]:
        """Whether there was a place within ``WAIT_S``; it is kept until the end of the block."""
        is_taken = self._places.acquire(blocking=False)
        if not is_taken and self._waiting.acquire(blocking=False):
            try:
                is_taken = self._places.acquire(timeout=WAIT_S)
            finally:
                self._waiting.release()
        try:
            yield is_taken
        finally:
            if is_taken:
                self._places.release()


def cut(connection: socket.socket) -> None:
    """End a connection under the thread that reads or writes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
