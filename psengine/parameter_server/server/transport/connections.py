"""The connections that zmq holds for this process: whose they are, and how much memory they fill.

zmq shows messages, not connections: it does not show a peer that says nothing, never ends a message, or never reads its
answers. A message carries its connection's file descriptor, and the kernel knows the rest. Where a connection's socket
is shut down, zmq closes the connection and frees all that it held for it.

    worker    its worker spoke not long ago, over any of its connections    not limited in number
    guest     every other connection                                        at most ``max_guests`` together

Beyond that, connections of the peer with most guests are cut: first those over which no message came, then those that
have been silent the longest.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
import stat
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from psengine.tracing.logging_format import RateLimit

logger = logging.getLogger(__name__)

MAX_GUESTS = 1024
# For snapshots, the status port and files that libraries open.
RESERVED_DESCRIPTORS = 64
# A worker may be stopped, or out of reach, for a while.
WORKER_S = 600.0
SCAN_S = 1.0
COUNT_S = 10.0
# Walking through all possible descriptors must stay fast.
MAX_DESCRIPTORS = 1 << 20
# Framing, and data in the kernel's buffers, explain less than this.
NEGLIGIBLE_BYTES = 16 << 20
# struct tcp_info: bytes_acked and bytes_received, since Linux 4.1.
_TCP_COUNTS = struct.Struct("@QQ")
_TCP_COUNTS_AT = 120


@dataclass(slots=True, eq=False)
class Connection:
    """One connection.

    Attributes:
        descriptor: its file descriptor, which zmq owns.
        inode: of its socket; tells it from a later one with the same descriptor.
        heard_s: when its last message came, or it was first seen.
        peer: an IP address, or "user N" over a Unix socket; "" until it is looked up.
        messages: how many came.
        worker_s: when its worker last spoke, over this or another connection.
        received_bytes, sent_bytes: of messages that zmq gave out and took.
        held_bytes: how much zmq must hold of incomplete messages and unread answers.
    """

    descriptor: int
    inode: int
    heard_s: float
    peer: str = ""
    messages: int = 0
    worker_s: float = float("-inf")
    received_bytes: int = 0
    sent_bytes: int = 0
    held_bytes: int = 0
    # Bytes that the kernel counted beyond messages, and the number of messages at that time.
    framing_in_bytes: int = 0
    framing_out_bytes: int = 0
    messages_counted: int = 0

    def count(self, acked_bytes: int, arrived_bytes: int) -> None:
        """Set ``held_bytes`` from the kernel's counts."""
        hidden_bytes = arrived_bytes - self.received_bytes - self.framing_in_bytes
        if self.messages != self.messages_counted and hidden_bytes < NEGLIGIBLE_BYTES:
            self.framing_in_bytes += hidden_bytes
            hidden_bytes = 0
        self.messages_counted = self.messages
        unread_bytes = self.sent_bytes + self.framing_out_bytes - acked_bytes
        if unread_bytes < 0:
            self.framing_out_bytes -= unread_bytes
            unread_bytes = 0
        self.held_bytes = max(0, hidden_bytes) + unread_bytes


class Connections:
    """All connections of this server. Shards' threads call ``heard`` and ``sent``, one other thread the rest.

    Args:
        is_ours: whether the server listens at this address of a socket, given as ``getsockname`` returns it.
    """

    def __init__(self, is_ours: Callable[[Any], bool]) -> None:
        self._is_ours = is_ours
        self._limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_guests = min(MAX_GUESTS, max(2, (self._limit - RESERVED_DESCRIPTORS) // 2))
        self._cuts = 0
        self._known: dict[int, Connection] = {}
        self._by_route: dict[bytes, Connection] = {}
        # Descriptors of other sockets, with their inodes.
        self._others: dict[int, int] = {}
        self._scan_s = self._count_s = float("-inf")
        self._lines = RateLimit(10.0)
        # dup2 onto an open descriptor needs no free one, and nothing else can get that descriptor meanwhile.
        self._blank = socket.socket(socket.AF_UNIX)
        self._hand = socket.socket(socket.AF_UNIX)

    def close(self) -> None:
        """Close its own descriptors."""
        self._blank.close()
        self._hand.close()

    # ---- in the shards' threads ------------------------------------------------------------------------------------

    def heard(self, descriptor: int, route: bytes, size_bytes: int, worker_routes: Iterable[bytes] = ()) -> None:
        """A message came over a connection; a worker's message names the routes of all its connections."""
        now_s = time.monotonic()
        connection = self._by_route.get(route)
        if connection is None or connection.descriptor != descriptor:
            try:
                inode = os.fstat(descriptor).st_ino
            except OSError:
                return  # closed already
            connection = self._known.get(descriptor)
            if connection is None or connection.inode != inode:
                connection = self._known[descriptor] = Connection(descriptor, inode, now_s)
            self._by_route[route] = connection
        connection.messages += 1
        connection.heard_s = now_s
        connection.received_bytes += size_bytes
        for one in worker_routes:
            if (known := self._by_route.get(one)) is not None:
                known.worker_s = now_s

    def sent(self, route: bytes, size_bytes: int) -> None:
        """A message was handed to zmq."""
        connection = self._by_route.get(route)
        if connection is not None:
            connection.sent_bytes += size_bytes

    # ---- in one thread ---------------------------------------------------------------------------------------------

    def status(self) -> dict[str, int]:
        """Fields of ``ServerStatus``."""
        return {"connections": len(self._known), "descriptor_limit": self._limit, "cut_connections": self._cuts}

    def keep_bounded(self) -> None:
        """Cut guests beyond the limit. Call it often: it scans once a second, or at once where there are many."""
        now_s = time.monotonic()
        try:
            descriptors = self._open_descriptors()
        except OSError:
            return  # this is not Linux
        if now_s < self._scan_s + SCAN_S and len(descriptors) <= self._max_guests:
            return
        self._scan_s = now_s
        self._scan(descriptors, now_s)
        if now_s >= self._count_s + COUNT_S:
            self._count(now_s)
        guests = [one for one in tuple(self._known.values()) if now_s - one.worker_s > WORKER_S]
        victims = _too_many(guests, self._max_guests)
        if not victims:
            return
        self._cut(victims)
        suppressed = self._lines.allows(now_s)
        if suppressed is not None:
            peers = Counter(one.peer for one in victims).most_common(3)
            logger.warning(
                "%d connections that are no worker's were cut (expected at most %d, got %d; those that were cut are of"
                " %s; %d cuts unmentioned)",
                len(victims),
                self._max_guests,
                len(guests),
                ", ".join(f"{peer} ({count})" for peer, count in peers),
                suppressed,
            )

    def cut_largest(self, excess_bytes: int) -> list[str]:
        """Cut the connections that hold most, until ``excess_bytes`` are freed; the peers that were cut.

        [] where connections do not explain the excess: the kernel counts no bytes of Unix sockets.
        """
        now_s = time.monotonic()
        with suppress(OSError):
            self._scan(self._open_descriptors(), now_s)
        self._count(now_s)
        victims: list[Connection] = []
        left_bytes = excess_bytes
        for one in sorted(self._known.values(), key=lambda one: one.held_bytes, reverse=True):
            if left_bytes <= 0 or one.held_bytes < NEGLIGIBLE_BYTES:
                break
            victims.append(one)
            left_bytes -= one.held_bytes
        if left_bytes > excess_bytes // 2:
            return []
        self._cut(victims)
        return [f"{one.peer} ({one.held_bytes >> 20} MiB)" for one in victims]

    def _scan(self, descriptors: Iterable[int], now_s: float) -> None:
        """Update the known connections."""
        found: set[int] = set()
        for descriptor in descriptors:
            try:
                status = os.fstat(descriptor)
            except OSError:
                continue
            if not stat.S_ISSOCK(status.st_mode) or self._others.get(descriptor) == status.st_ino:
                continue
            known = self._known.get(descriptor)
            if known is None or known.inode != status.st_ino or not known.peer:
                peer = self._peer_at(descriptor, status.st_ino)
                if peer is None:
                    self._others[descriptor] = status.st_ino
                    continue
                if known is None or known.inode != status.st_ino:
                    known = self._known[descriptor] = Connection(descriptor, status.st_ino, now_s)
                known.peer = peer
            found.add(descriptor)
        for descriptor in self._known.keys() - found:
            self._known.pop(descriptor, None)
        there = {id(one) for one in tuple(self._known.values())}
        for route, one in tuple(self._by_route.items()):
            if id(one) not in there:
                self._by_route.pop(route, None)

    def _peer_at(self, descriptor: int, inode: int) -> str | None:
        """The peer of a connection to this server; None of another socket."""
        with suppress(OSError), self._held(descriptor, inode) as held:
            if held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) or not self._is_ours(held.getsockname()):
                return None
            if held.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN) != socket.AF_UNIX:
                return str(held.getpeername()[0])
            credentials = held.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            return f"user {struct.unpack('3i', credentials)[1]}"
        return None

    def _count(self, now_s: float) -> None:
        """Ask the kernel how many bytes each connection carried."""
        self._count_s = now_s
        for one in tuple(self._known.values()):
            with suppress(OSError), self._held(one.descriptor, one.inode) as held:
                information = held.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                if len(information) >= _TCP_COUNTS_AT + _TCP_COUNTS.size:
                    one.count(*_TCP_COUNTS.unpack_from(information, _TCP_COUNTS_AT))

    def _cut(self, victims: Iterable[Connection]) -> None:
        for one in victims:
            with suppress(OSError), self._held(one.descriptor, one.inode) as held:
                held.shutdown(socket.SHUT_RDWR)
            self._known.pop(one.descriptor, None)
            self._others[one.descriptor] = one.inode  # until zmq has closed it
            self._cuts += 1

    @contextmanager
    def _held(self, descriptor: int, inode: int) -> Iterator[socket.socket]:
        """A duplicate of the socket at ``descriptor``; OSError where another socket has the descriptor by now."""
        os.dup2(descriptor, self._hand.fileno(), inheritable=False)
        try:
            if os.fstat(self._hand.fileno()).st_ino != inode:
                raise OSError(errno.EBADF, "another socket has this descriptor by now")
            yield self._hand
        finally:
            os.dup2(self._blank.fileno(), self._hand.fileno(), inheritable=False)

    def _open_descriptors(self) -> list[int]:
        try:
            return [int(name) for name in os.listdir("/proc/self/fd")]
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            return list(range(min(self._limit, MAX_DESCRIPTORS)))  # no descriptor is free to read the list by


def _too_many(guests: list[Connection], most: int) -> list[Connection]:
    """The guests to cut, so that ``most`` stay; see the module's text."""
    by_peer: dict[str, list[Connection]] = {}
    for one in sorted(guests, key=lambda one: (one.messages > 0, one.heard_s), reverse=True):
        by_peer.setdefault(one.peer, []).append(one)
    return [max(by_peer.values(), key=len).pop() for _ in range(len(guests) - most)]


def raise_descriptor_limit() -> None:
    """Let this process have as many file descriptors as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
