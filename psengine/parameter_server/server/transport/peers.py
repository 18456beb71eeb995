"""The connections behind one ROUTER socket: whether one still stands, and how one is closed.

zmq shows messages, not connections. A message carries its connection's file descriptor, and the socket's monitor tells
of each accepted one. Where a connection's socket is shut down, zmq closes it and frees all that it held for the peer,
who may connect again and say RESUME.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

# bytes_received in struct tcp_info, since Linux 4.1.
_INFORMATION, _RECEIVED_AT = (socket.IPPROTO_TCP, socket.TCP_INFO, 256), 128


@dataclass(slots=True)
class _Peer:
    descriptor: int
    inode: int  # of its socket; tells it from a later one with the same descriptor
    received_bytes: int = 0  # of messages that were complete

    @property
    def stands(self) -> bool:
        with suppress(OSError):
            return os.fstat(self.descriptor).st_ino == self.inode
        return False


class Peers:
    """Of one socket; used by the socket's thread."""

    def __init__(self, router: zmq.Socket[bytes]) -> None:
        self._router, self._accepted = router, router.get_monitor_socket(zmq.EVENT_ACCEPTED)
        self._peers: dict[int, _Peer] = {}  # by descriptor
        self._by_route: dict[bytes, _Peer] = {}
        # dup2 onto an open descriptor needs no free one, and nothing else can get that descriptor meanwhile.
        self._blank, self._hand = socket.socket(), socket.socket()

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
        return route in self._by_route and self._by_route[route].stands

    def close(self, route: bytes) -> bool:
        """Close a peer's connection; whether there was one."""
        peer = self._by_route.pop(route, None)
        return peer is not None and self._shut(peer)

    def close_unfinished(self, more_than_bytes: int) -> int:
        """Close connections over which more bytes came than messages explain; how many there were.

        The kernel counts no bytes of Unix sockets: where no TCP connection explains the memory, all those are closed.
        """
        self.look()
        came = [(peer, self._on(peer, *_INFORMATION)) for peer in self._peers.values()]
        known = [(peer, struct.unpack_from("@Q", found, _RECEIVED_AT)[0]) for peer, found in came if found is not None]
        large = [peer for peer, came_bytes in known if came_bytes - peer.received_bytes > more_than_bytes]
        return sum(map(self._shut, large or [peer for peer, found in came if found is None]))

    def look(self) -> None:
        """Learn of new connections, and forget those that are gone; call it often, or accepting stands still."""
        if not self._accepted.poll(0):
            return
        while self._accepted.poll(0):
            descriptor = int(recv_monitor_message(self._accepted)["value"])
            with suppress(OSError):
                self._peers[descriptor] = _Peer(descriptor, os.fstat(descriptor).st_ino)
        self._peers = {peer.descriptor: peer for peer in self._peers.values() if peer.stands}
        self._by_route = {route: peer for route, peer in self._by_route.items() if peer.stands}

    def end(self) -> None:
        """Before the socket is closed."""
        self._router.disable_monitor()
        for one in (self._accepted, self._blank, self._hand):
            one.close()

    def _shut(self, peer: _Peer) -> bool:
        return self._on(peer) is not None

    def _on(self, peer: _Peer, *option: int) -> bytes | None:
        """An option of the connection's socket; without one, shut it down. None: it is gone, or the system refuses."""
        try:
            os.dup2(peer.descriptor, self._hand.fileno(), inheritable=False)
            if os.fstat(self._hand.fileno()).st_ino != peer.inode:
                return None
            if option:
                return self._hand.getsockopt(option[0], option[1], option[2])
            self._hand.shutdown(socket.SHUT_RDWR)
            return b""
        except OSError:
            return None
        finally:
            os.dup2(self._blank.fileno(), self._hand.fileno(), inheritable=False)
