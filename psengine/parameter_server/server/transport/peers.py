"""The connections behind ROUTER sockets: who may have one, whether one still stands, and how one is closed.

    accepted ─ monitor ─► Doorkeeper ─► one too many, of its process or address or of all: closed
                              └ looks ─► the other end is gone, and what it sent is unread: closed, and dropped unread

zmq shows messages, not connections. A message carries its connection's file descriptor, and the socket's monitor tells
of each accepted one. Where a connection's socket is shut down, zmq closes it and frees all that it held for the peer,
who may connect again and say RESUME.

zmq stops reading a connection whose messages nobody takes, and then does not see that its other end is gone: clients
that come, send and go faster than a shard reads would leave descriptors behind until there are none. libzmq (4.3.5)
aborts where a Unix socket's connection finds no descriptor (``ipc_listener.cpp``), so some are always kept back; where
those become few, because who is turned away comes again at once, the Unix sockets have another name for a while.
"""

from __future__ import annotations

import itertools
import os
import resource
import select
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from psengine.parameter_server.sockets import Waker

# Of bytes_received in struct tcp_info, since Linux 4.1.
_RECEIVED_AT = 128
# How often connections are looked at whose other end may be gone; more often where there is no room.
LOOK_S, HURRY_S = 0.5, 0.05
# Connections whose other end is gone, and whose messages are unread: as many stay until they are read. A worker that
# says LEAVE and ends should be heard.
GONE_KEPT = 32
# Of one process or address, at most. A worker has two at a shard.
MOST_OF_ONE = 1024
MAX_DESCRIPTORS = 1 << 20
# zmq accepts no more while so many of a socket's events are unread: where as many descriptors are kept back, they last
# however late this thread is.
UNREAD_EVENTS = 1100
_IS_GONE = getattr(select, "POLLRDHUP", 0) | select.POLLHUP
SAY_S = 10.0
_numbers = itertools.count()


@dataclass(slots=True)
class _Peer:
    descriptor: int
    inode: int  # of its socket; tells it from a later one with the same descriptor
    received_bytes: int = 0  # of messages that were complete
    is_dropped: bool = False  # closed here: what it has sent is not wanted

    @classmethod
    def of(cls, descriptor: int) -> _Peer:
        """Of a connection's descriptor; of one that is closed a peer that does not stand."""
        try:
            return cls(descriptor, os.fstat(descriptor).st_ino)
        except OSError:
            return cls(-1, 0)

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

    def whose(self) -> str:
        """The process or the address at the other end, for people; "" where it is gone."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.descriptor)) as own:
            if own.family != socket.AF_UNIX:
                return f"address {own.getpeername()[0]}"
            credentials = own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            return f"process {struct.unpack('3i', credentials)[0]}"
        return ""


class Peers:
    """Of one socket; used by the socket's thread, but for ``accepted`` and ``standing``, which are a doorkeeper's.

    Attributes:
        connections: that are open.
        turned_away: those that were one too many.
        dropped: those whose other end was gone before their messages were read.
        paths: of the Unix sockets that accept them.
    """

    def __init__(self, router: zmq.Socket[bytes]) -> None:
        self.paths: list[str] = []
        self._router, address = router, f"inproc://psengine-accepted-{next(_numbers)}"
        router.monitor(address, zmq.EVENT_ACCEPTED)
        self.monitor: zmq.Socket[bytes] = router.context.socket(zmq.PAIR)
        self.monitor.setsockopt(zmq.RCVHWM, 1)  # beside the other side's 1,000, which cannot be changed
        self.monitor.connect(address)
        self._peers: dict[int, _Peer] = {}  # by descriptor
        self._by_route: dict[bytes, _Peer] = {}
        self._has_lost = False  # one of them, so that ``_by_route`` may have it still
        self.has_doorkeeper = False
        self.connections = self.turned_away = self.dropped = 0

    # ---- the socket's thread -----------------------------------------------------------------------------------

    def heard(self, route: bytes, part: zmq.Frame, size_bytes: int, *, is_pressed: bool) -> bool:
        """A message came; whether it is to be taken: not if its sender was dropped or, ``is_pressed``, is gone."""
        peer = self._by_route.get(route)
        if peer is None:
            try:
                peer = self._by_route[route] = self._find(int(part.get(zmq.SRCFD)))
            except zmq.ZMQError:
                return True  # of this process
        peer.received_bytes += size_bytes
        return not peer.is_dropped and (not is_pressed or peer.stands())

    def _find(self, descriptor: int) -> _Peer:
        peer = self._peers.get(descriptor)
        if peer is None or not peer.stands():
            peer = _Peer.of(descriptor)
            if peer.inode:
                self._peers[descriptor] = peer
        return peer

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
        known = [(peer, peer.unexplained_bytes()) for peer in list(self._peers.values())]
        large = [peer for peer, unexplained in known if unexplained is not None and unexplained > more_than_bytes]
        return sum(peer.close() for peer in large or [peer for peer, unexplained in known if unexplained is None])

    def look(self) -> None:
        """Forget the routes of those that are gone; call it often."""
        if self._has_lost:
            self._has_lost = False
            self._by_route = {route: peer for route, peer in self._by_route.items() if peer.stands()}

    def end(self) -> None:
        """Before the socket is closed."""
        self._router.disable_monitor()
        if not self.has_doorkeeper:
            self.monitor.close()

    # ---- a doorkeeper's thread ---------------------------------------------------------------------------------

    def accepted(self) -> Iterator[_Peer]:
        """The new connections."""
        while self.monitor.poll(0):
            yield self._find(int(recv_monitor_message(self.monitor)["value"]))

    def standing(self) -> list[_Peer]:
        """The connections that are open, but for dropped ones; others are forgotten."""
        for peer in list(self._peers.values()):
            if not peer.stands():
                self._has_lost = True
                if self._peers.get(peer.descriptor) is peer:
                    del self._peers[peer.descriptor]
        found = [peer for peer in list(self._peers.values()) if not peer.is_dropped]
        self.connections = len(found)
        return found


class Doorkeeper(threading.Thread):
    """Bounds the connections of all sockets of a server.

    Args:
        note: says something to people; see ``EventLog.note``.

    Attributes:
        limit: most connections, of all sockets; below the limit of descriptors.
    """

    def __init__(self, note: Callable[[str, str], None]) -> None:
        super().__init__(name="psengine-doorkeeper", daemon=True)
        self._note = note
        self._all: list[Peers] = []
        self._open = self._unsaid = 0
        self._of: dict[tuple[int, int], str] = {}  # whose each is, by descriptor and inode
        self._count: Counter[str] = Counter()
        self._waker = Waker()
        self._ends = False
        self._next_look_s = self._next_say_s = 0.0
        self._why, self._is_hidden = "", False
        self._kept_back = 0
        self.limit = self._room()

    def watch(self, peers: Peers) -> None:
        """Those of one more socket; before the start."""
        peers.has_doorkeeper = True
        self._all.append(peers)
        self.limit = self._room()

    @property
    def limit_of_one(self) -> int:
        """Most connections of one process or address: others find room."""
        return min(MOST_OF_ONE * max(1, len(self._all)), self.limit // 2)

    def run(self) -> None:
        """Until ``end``."""
        poller: zmq.Poller = zmq.Poller()
        for monitor in (self._waker.descriptor, *(peers.monitor for peers in self._all)):
            poller.register(monitor, zmq.POLLIN)
        while not self._ends:
            poller.poll(round(LOOK_S * 1000))
            for peers in self._all:
                for peer in peers.accepted():
                    self._admit(peers, peer)
            if (now_s := time.monotonic()) >= self._next_look_s:
                self._look(now_s)
        self._hide(False)
        for peers in self._all:
            peers.monitor.close()
        self._waker.close()

    def end(self) -> None:
        """Admit nobody any more, and return when the thread has ended."""
        self._ends = True
        self._waker.wake()
        if self.is_alive():
            self.join(timeout=5.0)

    def _admit(self, peers: Peers, peer: _Peer) -> None:
        who = self._of[peer.descriptor, peer.inode] = peer.whose()
        self._open += 1
        self._count[who] += 1
        now_s = time.monotonic()
        if self._open > self.limit and now_s >= self._next_look_s - LOOK_S + HURRY_S:
            self._look(now_s)
        if self._open > self.limit:
            why = f"{self.limit} are open, the most that the limit of open files leaves (ulimit -n, LimitNOFILE=)"
        elif self._count[who] > self.limit_of_one:
            why = f"{who} has {self.limit_of_one}, the most of one process or address"
        else:
            return
        peers.turned_away += 1
        self._drop(peer, f"connections are turned away: {why}")
        if not self._is_hidden and self._free() < self._kept_back // 2:
            self._hide(True)

    def _drop(self, peer: _Peer, why: str) -> None:
        peer.is_dropped = True
        peer.close()
        self._open -= 1
        self._count[self._of.get((peer.descriptor, peer.inode), "")] -= 1
        self._unsaid, self._why = self._unsaid + 1, why

    def _look(self, now_s: float) -> None:
        """Count what is open, and drop those whose other end is gone where they are many."""
        standing = {(one.descriptor, one.inode): (one, peers) for peers in self._all for one in peers.standing()}
        self._of = {key: self._of.get(key) or one.whose() for key, (one, _) in standing.items()}
        self._open, self._count = len(standing), Counter(self._of.values())
        by_descriptor = {one.descriptor: (one, peers) for one, peers in standing.values()}
        kernel = select.poll()
        for descriptor in by_descriptor:
            kernel.register(descriptor, _IS_GONE)
        gone = [by_descriptor[descriptor] for descriptor, event in kernel.poll(0) if event & _IS_GONE]
        if len(gone) > GONE_KEPT or self._open > self.limit:
            for peer, peers in gone:
                peers.dropped += 1
                self._drop(
                    peer, "clients connect, send and go faster than this server reads: what they sent is dropped"
                )
        self.limit = self._room()
        if self._is_hidden and self._free() > self._kept_back // 2:
            self._hide(False)
        self._next_look_s = now_s + LOOK_S
        if self._unsaid and now_s >= self._next_say_s:
            self._note("connections", f"{self._why}; {self._unsaid} connections were closed")
            self._unsaid, self._next_say_s = 0, now_s + SAY_S

    def _room(self) -> int:
        """Descriptors for connections: others are kept back, of a few the half."""
        left = self._free() + self._open
        self._kept_back = max(min(left // 2, UNREAD_EVENTS * len(self._all)), left // 8)
        return max(1, left - self._kept_back)

    def _free(self) -> int:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MAX_DESCRIPTORS)
        with suppress(OSError):
            return most - len(os.listdir("/dev/fd"))
        return 0  # it takes one itself

    def _hide(self, is_hidden: bool) -> None:
        """Give the Unix sockets another name, so that nobody finds them, or their own again."""
        for path in (path for peers in self._all for path in peers.paths):
            names = path, f"{path}.full"
            with suppress(OSError):
                os.rename(*(names if is_hidden else reversed(names)))
        self._is_hidden = is_hidden
