"""The connections that zmq holds for this process, as the kernel sees them: whose they are, and how much is in them.

zmq shows messages, not connections: a peer that says nothing, never ends a message, or never reads its answers
is out of its sight. A message tells its connection's file descriptor, and the kernel tells the rest. A connection whose
socket is shut down is one that zmq closes, with all that it held for it.

    worker    its worker spoke not long ago, here or elsewhere   never cut for its number
    guest     something else that is a message came over it      at most ``max_guests`` together; of the peer with most
    silent    nothing came over it                               of them those are cut that have been silent longest
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
# For snapshots, the status port and what libraries open.
RESERVED_DESCRIPTORS = 64
# A worker may be stopped, or out of reach, for a while.
WORKER_S = 600.0
SCAN_S = 1.0
COUNT_S = 10.0
# More would only make whoever walks through all possible descriptors slow.
MAX_DESCRIPTORS = 1 << 20
# Framing, and what lies in the kernel's buffers: less than this is nobody's fault.
NEGLIGIBLE_BYTES = 16 << 20
_DESCRIPTORS = "/proc/self/fd"
# struct tcp_info: bytes_acked and bytes_received, since Linux 4.1.
_TCP_COUNTS = struct.Struct("@QQ")
_TCP_COUNTS_AT = 120


@dataclass(slots=True, eq=False)
class Connection:
    """One of them.

    Attributes:
        descriptor: its file descriptor, which zmq owns.
        inode: of its socket: tells it from a later one with the same descriptor.
        heard_s: when its last message came, or it was first seen.
        peer: whose it is: an IP address, or "user N" over a Unix socket; "" until it is looked at.
        messages: how many came.
        worker_s: when the worker whose it is last spoke, over this or another of its connections.
        received_bytes, sent_bytes: of messages that zmq gave out and took.
        held_bytes: what zmq must hold for it, of messages that are not complete and answers that are not read.
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
    # What the kernel counted beyond messages; and how many messages there were then.
    framing_in_bytes: int = 0
    framing_out_bytes: int = 0
    messages_counted: int = 0

    def count(self, acked_bytes: int, arrived_bytes: int) -> None:
        """Set ``held_bytes`` from what the kernel has counted."""
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
    """See the module's text. ``heard`` and ``sent`` are for the shards' threads, the rest for one other thread.

    Args:
        is_ours: whether a socket's own address, as ``getsockname`` has it, is one that this server listens at.
        max_guests: most connections that are no worker's; None: by how many descriptors the process may have.

    Attributes:
        cut: how many were cut.
        max_guests: see above.
    """

    def __init__(self, is_ours: Callable[[Any], bool], max_guests: int | None = None) -> None:
        self._is_ours = is_ours
        self._limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.max_guests = max_guests or min(MAX_GUESTS, max(2, (self._limit - RESERVED_DESCRIPTORS) // 2))
        self.cut = 0
        self._known: dict[int, Connection] = {}
        self._by_route: dict[bytes, Connection] = {}
        # Descriptors that are something else: with the inodes they had then.
        self._others: dict[int, int] = {}
        self._scan_s = self._count_s = float("-inf")
        self._lines = RateLimit(10.0)
        # dup2 onto a descriptor that is there needs no free one, and what it holds cannot become another's meanwhile.
        self._blank = socket.socket(socket.AF_UNIX)
        self._hand = socket.socket(socket.AF_UNIX)

    def close(self) -> None:
        """Let go of its own descriptors."""
        self._blank.close()
        self._hand.close()

    # ---- in the shards' threads ------------------------------------------------------------------------------------

    def heard(self, descriptor: int, route: bytes, size_bytes: int, worker_routes: Iterable[bytes] = ()) -> None:
        """A message came over a connection; ``worker_routes``: a worker's, all of whose connections these are."""
        now_s = time.monotonic()
        connection = self._by_route.get(route)
        if connection is None or connection.descriptor != descriptor:
            try:
                inode = os.fstat(descriptor).st_ino
            except OSError:
                return  # it is gone already
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
        """JSON-able."""
        return {"connections": len(self._known), "descriptor_limit": self._limit, "cut_connections": self.cut}

    def keep_bounded(self) -> None:
        """Cut guests that are too many. To be called often: it looks closely once a second, or where there are many."""
        now_s = time.monotonic()
        try:
            descriptors = _open_descriptors(self._limit)
        except OSError:
            return  # this is not Linux
        if now_s < self._scan_s + SCAN_S and len(descriptors) <= self.max_guests:
            return
        self._scan_s = now_s
        self._scan(descriptors, now_s)
        if now_s >= self._count_s + COUNT_S:
            self._count(now_s)
        guests = [one for one in tuple(self._known.values()) if now_s - one.worker_s > WORKER_S]
        victims = _too_many(guests, self.max_guests)
        if not victims:
            return
        self._cut(victims)
        suppressed = self._lines.allows(now_s)
        if suppressed is not None:
            peers = Counter(one.peer for one in victims).most_common(3)
            logger.warning(
                "%d connections that are no worker's were cut, those of who has most and had said nothing for longest"
                " (expected at most %d, got %d, most of them of %s; %d cuts unmentioned)",
                len(victims),
                self.max_guests,
                len(guests),
                ", ".join(f"{peer} ({count})" for peer, count in peers),
                suppressed,
            )

    def cut_largest(self, excess_bytes: int) -> list[str]:
        """Cut the connections for which zmq holds most, as many as make up ``excess_bytes``; whose they were.

        [] where there are none that explain it: over Unix sockets the kernel counts no bytes.
        """
        now_s = time.monotonic()
        with suppress(OSError):
            self._scan(_open_descriptors(self._limit), now_s)
        self._count(now_s)
        ranked = sorted(self._known.values(), key=lambda one: one.held_bytes, reverse=True)
        victims: list[Connection] = []
        left_bytes = excess_bytes
        for one in ranked:
            if left_bytes <= 0 or one.held_bytes < NEGLIGIBLE_BYTES:
                break
            victims.append(one)
            left_bytes -= one.held_bytes
        if left_bytes > excess_bytes // 2:
            return []
        self._cut(victims)
        return [f"{one.peer} ({one.held_bytes >> 20} MiB)" for one in victims]

    def _scan(self, descriptors: Iterable[int], now_s: float) -> None:
        """Learn which connections there are."""
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
        """Who is at the other end; None where the socket is no connection to this server."""
        with suppress(OSError), self._held(descriptor, inode) as held:
            if held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) or not self._is_ours(held.getsockname()):
                return None
            if held.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN) != socket.AF_UNIX:
                return str(held.getpeername()[0])
            credentials = held.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            return f"user {struct.unpack('3i', credentials)[1]}"
        return None

    def _count(self, now_s: float) -> None:
        """Ask the kernel how many bytes went over each."""
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
            self.cut += 1

    @contextmanager
    def _held(self, descriptor: int, inode: int) -> Iterator[socket.socket]:
        """The socket at ``descriptor``, kept from being closed; OSError where it is another by now."""
        os.dup2(descriptor, self._hand.fileno(), inheritable=False)
        try:
            if os.fstat(self._hand.fileno()).st_ino != inode:
                raise OSError(errno.EBADF, "another socket has this descriptor by now")
            yield self._hand
        finally:
            os.dup2(self._blank.fileno(), self._hand.fileno(), inheritable=False)


def _too_many(guests: list[Connection], most: int) -> list[Connection]:
    """Those to cut, so that ``most`` stay: of whom has most of them, silent ones first, the longest silent first."""
    by_peer: dict[str, list[Connection]] = {}
    for one in sorted(guests, key=lambda one: (one.messages > 0, one.heard_s), reverse=True):
        by_peer.setdefault(one.peer, []).append(one)
    victims = []
    for _ in range(len(guests) - most):
        victims.append(max(by_peer.values(), key=len).pop())
    return victims


def _open_descriptors(limit: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(_DESCRIPTORS)]
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        return list(range(min(limit, 1 << 20)))  # there is none left to read the list by


def raise_descriptor_limit() -> int:
    """Let this process have as many file descriptors as the system allows it; how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
