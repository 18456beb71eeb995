"""A slow link between workers and one shard, without root: a TCP relay with a byte rate and a counter for each way.

    worker ══ relay.address ══ [ at most up.bytes_per_s ► ] ══ target
                               [ ◄ at most down.bytes_per_s ]

The bytes of all connections share the rate, a few KiB of each in turn, as on a wire. Nothing is lost, unless ``cut``
ends the connections. The relay's address is not the one that the server lists, so that no client leaves it for the
server's Unix socket.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

# A turn of one connection on the wire, and what the relay's sockets hold: what waits, waits in the peers' own queues.
TURN_BYTES = 4096
BUFFER_BYTES = 16 * 1024
LOOK_S = 0.1


class Wire:
    """One way of the link: its rate, which may be changed at any time, and what has gone through."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.carried_bytes = 0
        self._lock = threading.Lock()
        self._free_s = 0.0

    def take(self, size_bytes: int, is_over: Callable[[], bool]) -> None:
        """Wait until the wire has carried ``size_bytes`` more, or ``is_over()``."""
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + size_bytes / self.bytes_per_s
            mine_s = self._free_s
        while (wait_s := mine_s - time.monotonic()) > 0 and not is_over():
            time.sleep(min(wait_s, LOOK_S))
        with self._lock:
            self.carried_bytes += size_bytes


class ThrottledRelay:
    """See the module's text; ``address`` is where workers connect to, ``up`` and ``down`` are the two ways."""

    def __init__(self, target: str, bytes_per_s: float) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname or "", parts.port or 0)
        self.up, self.down = Wire(bytes_per_s), Wire(bytes_per_s)
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._lock = threading.Lock()
        self._is_over = False
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        # Before listening: accepted sockets inherit it.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._listener.settimeout(LOOK_S)
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._begin(self._accept)

    def cut(self) -> int:
        """End every connection at once, what is under way with it; how many there were. New ones are taken."""
        with self._lock:
            pairs = tuple(self._pairs)
        for pair in pairs:
            self._end(pair)
        return len(pairs)

    def close(self) -> None:
        """End it."""
        self._is_over = True
        self.cut()
        for thread in self._threads:
            thread.join(timeout=10)
        self._listener.close()

    def _begin(self, function: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._is_over:
            try:
                near, _ = self._listener.accept()
            except TimeoutError:
                continue
            try:
                far = socket.socket()
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
                far.connect(self._target)
            except OSError:  # nobody listens there, for now
                near.close()
                far.close()
                continue
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
                one.settimeout(None)
            pair = (near, far)
            with self._lock:
                self._pairs.add(pair)
            self._begin(self._carry, pair, near, far, self.up)
            self._begin(self._carry, pair, far, near, self.down)

    def _carry(self, pair: Any, source: socket.socket, sink: socket.socket, wire: Wire) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(TURN_BYTES):
                wire.take(len(data), lambda: pair not in self._pairs)
                sink.sendall(data)
        self._end(pair)

    def _end(self, pair: Any) -> None:
        with self._lock:
            if pair not in self._pairs:
                return
            self._pairs.discard(pair)
        for one in pair:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@contextmanager
def throttled_relay(target: str, bytes_per_s: float = 1e9) -> Iterator[ThrottledRelay]:
    """A relay before the shard at ``target`` ("tcp://127.0.0.1:7077"), ended with this context."""
    relay = ThrottledRelay(target, bytes_per_s)
    try:
        yield relay
    finally:
        relay.close()
