"""The connections behind one ROUTER socket: whether one still stands, and how one is closed.

zmq shows messages, not connections. A message carries its connection's file descriptor, and the socket's monitor tells
of each accepted one. Where a connection's socket is shut down, zmq closes it and frees all that it held for the peer,
who may connect again and say RESUME.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

# Of bytes_received in struct tcp_info, since Linux 4.1.
_RECEIVED_AT = 128


@dataclass(slots=True)
class _Peer:
    descriptor: int
    inode: int  # of its socket; tells it from a later one with the same descriptor
    received_bytes: int = 0  # of messages that were complete

    def stands(self, descriptor: int | None = None) -> bool:
        """Whether this descriptor, or its own, is still the connection's."""
        with suppress(OSError):
            return os.fstat(self.descriptor if descriptor is None else descriptor).st_ino == self.inode
        return False

    def close(self) -> bool:
        """Shut it down; False: it is gone, or the system refuses."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.descriptor)) as own:
            if self.stands(own.fileno()):
                own.shutdown(socket.SHUT_RDWR)
                return True
        return False

    def unexplained_bytes(self) -> int | None:
        """How many bytes came beyond those of messages; None where the kernel does not count them."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.descriptor)) as own:
            information = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            return int.from_bytes(information[_RECEIVED_AT : _RECEIVED_AT + 8], sys.byteorder) - self.received_bytes
        return None


class Peers:
    """Of one socket; used by the socket's thread."""

    def __init__(self, router: zmq.Socket[bytes]) -> None:
        self._router, self._accepted = router, router.get_monitor_socket(zmq.EVENT_ACCEPTED)
        self._peers: dict[int, _Peer] = {}  # by descriptor
        self._by_route: dict[bytes, _Peer] = {}

    def heard(self, route: bytes, part: zmq.Frame, size_bytes: int) -> None:
        """A message came."""
        if route not in self._by_route:
            self.look()
            try:
                self._by_route[route] = self._peers[int(part.get(zmq.SRCFD))]
            except (zmq.ZMQError, KeyError):
                return  # of this process, or closed already
        self._by_route[route].received_bytes += size_bytes

    def is_connected(self, route: bytes) -> bool:
        """Whether the connection stands, as far as the kernel knows."""
        return route in self._by_route and self._by_route[route].stands()

    def close(self, route: bytes) -> bool:
        """Close a peer's connection; whether there was one."""
        peer = self._by_route.pop(route, None)
        return peer is not None and peer.close()

    def close_unfinished(self, more_than_bytes: int) -> int:
        """Close connections over which more bytes came than messages explain; how many there were.

        The kernel counts no bytes of Unix sockets: where no TCP connection explains the memory, all those are closed.
        """
        self.look()
        known = [(peer, peer.unexplained_bytes()) for peer in self._peers.values()]
        large = [peer for peer, unexplained in known if unexplained is not None and unexplained > more_than_bytes]
        return sum(peer.close() for peer in large or [peer for peer, unexplained in known if unexplained is None])

    def look(self) -> None:
        """Learn of new connections, and forget those that are gone; call it often, or accepting stands still."""
        if not self._accepted.poll(0):
            return
        while self._accepted.poll(0):
            descriptor = int(recv_monitor_message(self._accepted)["value"])
            with suppress(OSError):
                self._peers[descriptor] = _Peer(descriptor, os.fstat(descriptor).st_ino)
        self._peers = {peer.descriptor: peer for peer in self._peers.values() if peer.stands()}
        self._by_route = {route: peer for route, peer in self._by_route.items() if peer.stands()}

    def end(self) -> None:
        """Before the socket is closed."""
        self._router.disable_monitor()
        self._accepted.close()
