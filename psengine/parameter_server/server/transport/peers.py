"""The connections behind one ROUTER socket: whether one still stands, and how one is closed.

zmq shows messages, not connections. A message carries its connection's file descriptor, and the socket's monitor tells
of each accepted one. Where a connection's socket is shut down, zmq closes it and frees all that it held for the peer,
who may connect again and say RESUME.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

# bytes_received in struct tcp_info, since Linux 4.1.
_RECEIVED_AT, _INFORMATION_BYTES = 128, 256


@dataclass(slots=True)
class _Peer:
    descriptor: int
    inode: int  # of its socket; tells it from a later one with the same descriptor
    received_bytes: int = 0  # of messages that were complete

    @property
    def stands(self) -> bool:
        try:
            return os.fstat(self.descriptor).st_ino == self.inode
        except OSError:
            return False


class Peers:
    """Of one socket; used by the socket's thread."""

    def __init__(self, router: zmq.Socket[bytes]) -> None:
        self._router = router
        self._accepted = router.get_monitor_socket(zmq.EVENT_ACCEPTED)
        self._peers: dict[int, _Peer] = {}  # by descriptor
        self._by_route: dict[bytes, _Peer] = {}
        # dup2 onto an open descriptor needs no free one, and nothing else can get that descriptor meanwhile.
        self._blank, self._hand = socket.socket(), socket.socket()

    def heard(self, route: bytes, part: zmq.Frame, size_bytes: int) -> None:
        """A message came."""
        peer = self._by_route.get(route)
        if peer is None:
            self.look()
            try:
                peer = self._note(int(part.get(zmq.SRCFD)))
            except (zmq.ZMQError, OSError):
                return  # of this process, or closed already
            self._by_route[route] = peer
        peer.received_bytes += size_bytes

    def is_connected(self, route: bytes) -> bool:
        """Whether the connection stands, as far as the kernel knows."""
        peer = self._by_route.get(route)
        return peer is not None and peer.stands

    def close(self, route: bytes) -> bool:
        """Close a peer's connection; whether there was one."""
        peer = self._by_route.pop(route, None)
        return peer is not None and self._shut(peer)

    def close_unfinished(self, more_than_bytes: int) -> int:
        """Close connections over which more bytes came than messages explain; how many there were.

        The kernel counts no bytes of Unix sockets: where no TCP connection explains the memory, all those are closed.
        """
        self.look()
        known = [(peer, self._received_bytes(peer)) for peer in self._peers.values()]
        large = [peer for peer, came in known if came is not None and came - peer.received_bytes > more_than_bytes]
        return sum(map(self._shut, large or [peer for peer, came in known if came is None]))

    def look(self) -> None:
        """Learn of new connections, and forget those that are gone; call it often, or accepting stands still."""
        descriptors = []
        with suppress(zmq.Again):
            while True:
                descriptors.append(int(recv_monitor_message(self._accepted, zmq.NOBLOCK)["value"]))
        for descriptor in descriptors:
            with suppress(OSError):
                self._note(descriptor)
        if descriptors:
            self._peers = {peer.descriptor: peer for peer in self._peers.values() if peer.stands}
            self._by_route = {route: peer for route, peer in self._by_route.items() if peer.stands}

    def end(self) -> None:
        """Before the socket is closed."""
        self._router.disable_monitor()
        for one in (self._accepted, self._blank, self._hand):
            one.close()

    def _note(self, descriptor: int) -> _Peer:
        inode, peer = os.fstat(descriptor).st_ino, self._peers.get(descriptor)
        if peer is None or peer.inode != inode:
            peer = self._peers[descriptor] = _Peer(descriptor, inode)
        return peer

    def _received_bytes(self, peer: _Peer) -> int | None:
        """Bytes that came over the connection; None where the kernel does not say."""
        found = self._on(peer, lambda one: one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFORMATION_BYTES))
        return None if found is None else int(struct.unpack_from("@Q", found, _RECEIVED_AT)[0])

    def _shut(self, peer: _Peer) -> bool:
        def shut(one: socket.socket) -> bytes:
            one.shutdown(socket.SHUT_RDWR)
            return b""

        return self._on(peer, shut) is not None

    def _on(self, peer: _Peer, call: Callable[[socket.socket], bytes]) -> bytes | None:
        """What ``call`` returns of the connection's socket; None where it is gone, or the system refuses."""
        try:
            os.dup2(peer.descriptor, self._hand.fileno(), inheritable=False)
            return call(self._hand) if os.fstat(self._hand.fileno()).st_ino == peer.inode else None
        except OSError:
            return None
        finally:
            os.dup2(self._blank.fileno(), self._hand.fileno(), inheritable=False)
