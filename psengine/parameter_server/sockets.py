"""What the sockets of clients and servers have in common, and how a thread that polls them is woken."""

from __future__ import annotations

import math
from contextlib import suppress
from socket import socketpair
from typing import Any

import zmq

from psengine.protocol.keys import KeyPair

# A connection that ends is not made again: the socket is closed.
_NEVER_MS = 1 << 30
HANDSHAKE_MS = 2000


def keep_alive(lease_s: float) -> dict[int, int]:
    """Socket options by which a connection to a host that says nothing ends within about a lease.

    The kernel counts whole seconds, and two probes may be lost: it is three seconds at least.
    """
    third_s = max(1, math.floor(lease_s / 3))
    return {
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: third_s,
        zmq.TCP_KEEPALIVE_INTVL: third_s,
        zmq.TCP_KEEPALIVE_CNT: 2,
        zmq.TCP_MAXRT: max(1000, int(lease_s * 1000)),  # where something is to be sent
    }


def make_dealer(
    context: zmq.Context[Any],
    address: str,
    lease_s: float,
    keys: tuple[str, KeyPair] | None,
    *,
    linger_ms: int,
    most_bytes: int = -1,
) -> zmq.Socket[bytes]:
    """A DEALER for one connection to ``address``, which is not made yet; ``keys``: the server's public key, and ours.

    What is in flight is bounded by credits and windows, and nothing is sent before there is a connection.
    """
    # RECONNECT_IVL is not -1, and IMMEDIATE is not set: libzmq would end the pipe in the middle of a message that is
    # being read, and abort.
    options = keep_alive(lease_s) | {zmq.HANDSHAKE_IVL: HANDSHAKE_MS, zmq.RECONNECT_IVL: _NEVER_MS, zmq.SNDHWM: 0}
    options |= {zmq.RCVHWM: 0, zmq.IPV6: int("[" in address), zmq.LINGER: linger_ms, zmq.MAXMSGSIZE: most_bytes}
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    for option, value in options.items():
        socket.setsockopt(option, value)
    if keys is not None:
        server, pair = keys
        socket.curve_serverkey = server.encode()
        socket.curve_publickey, socket.curve_secretkey = pair.public.encode(), pair.secret.encode()
    return socket


class Waker:
    """Wakes a thread that polls ``descriptor``."""

    def __init__(self) -> None:
        self._reader, self._writer = socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self.descriptor = self._reader.fileno()

    def wake(self) -> None:
        """Make it readable; any thread."""
        with suppress(OSError):  # full: it will wake up; closed: it has ended
            self._writer.send(b"w")

    def clear(self) -> None:
        """The thread is awake."""
        with suppress(BlockingIOError):
            self._reader.recv(4096)

    def close(self) -> None:
        """Nobody polls it any more."""
        self._reader.close()
        self._writer.close()
