"""Connections between workers and servers: what TCP under ZeroMQ does.

    worker ── socket 4 ── connection 17 ── shard        frames arrive in order, or with the connection never
                    ✗ broken: both ends learn it, each after a while; the worker opens another socket

Nothing is lost, doubled or reordered inside a connection. Over a link that is cut frames wait; a cut that outlasts the
lease ends its connections, as keep-alive does.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from psengine.protocol.messages import MessageType
from simulation.clock import Clock

UP, DOWN = 0, 1
TYPE_OFFSET = 6  # in a header
COUNTED = (MessageType.VIEW, MessageType.PREPARE, MessageType.RELEASE, MessageType.COMMIT)
HANDSHAKE_S = 2.0
RETRY_S = 0.05


@dataclass(eq=False)
class Socket:
    """A worker's end, or a follower's: of one connection, or of an attempt."""

    peer: Any
    channel: Any
    server: int
    shard: int
    connection: Connection | None = None
    is_closed: bool = False


@dataclass(eq=False)
class Connection:
    """One; ``route`` is its routing id at the server."""

    socket: Socket
    server: Any
    route: bytes
    delay_s: float
    is_broken: bool = False
    last_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    held: tuple[list[list[bytes]], list[list[bytes]]] = field(default_factory=lambda: ([], []))

    @property
    def rank(self) -> int:
        """Of the worker."""
        return self.socket.peer.rank


@dataclass(frozen=True)
class Cut:
    """Nothing passes between a worker, or a follower, and a host, in one direction or both; None: any."""

    rank: int | None
    server: int | None
    directions: tuple[int, ...]

    def covers(self, rank: int, server: int, direction: int | None = None) -> bool:
        return (
            (direction is None or direction in self.directions)
            and self.rank in (None, rank)
            and self.server in (None, server)
        )


class Network:
    """See the module's text.

    Args:
        latency_s: the shortest and the longest delay of a connection.
        lease_s: how long a connection lives over a link that is cut.
    """

    def __init__(self, clock: Clock, rng: random.Random, latency_s: tuple[float, float], lease_s: float) -> None:
        self._clock, self._rng, self._latency_s, self._lease_s = clock, rng, latency_s, lease_s
        self.servers: list[Any] = []
        self.cuts: list[Cut] = []
        self.connections: list[Connection] = []
        self.counts: Counter[str] = Counter()
        self._count = 0

    # ---- connections -------------------------------------------------------------------------------------------

    def connect(self, socket: Socket) -> None:
        """Begin to connect; the worker hears ``opened`` or ``lost``."""
        self._clock.after(self._delay_s(), self._try, socket, self._clock.now_s + HANDSHAKE_S)

    def _try(self, socket: Socket, deadline_s: float) -> None:
        if socket.peer.is_dead or socket.is_closed:
            return
        server = self.servers[socket.server]
        is_cut = any(cut.covers(socket.peer.rank, socket.server) for cut in self.cuts)
        if server.is_up and not server.is_paused and not is_cut:
            self._count += 1
            socket.connection = connection = Connection(socket, server, f"{self._count}".encode(), self._delay_s())
            self.connections.append(connection)
            server.connections[connection.route] = connection
            socket.peer.opened(socket)
        elif not server.is_up or self._clock.now_s >= deadline_s:
            socket.peer.lost(socket)
        else:
            self._clock.after(RETRY_S, self._try, socket, deadline_s)

    def close(self, socket: Socket) -> None:
        """The worker closes it; what it sent before still arrives, and then the server learns it."""
        socket.is_closed = True
        connection = socket.connection
        if connection is not None and connection in self.connections:
            self.connections.remove(connection)
            last_s = max(connection.last_s[UP], self._clock.now_s + connection.delay_s)
            self._clock.at(last_s, self._end, connection)

    def drop(self, connection: Connection, *, worker_s: float, server_s: float) -> None:
        """The connection breaks, with everything under way; the ends learn it after these times."""
        if connection.is_broken:
            return
        connection.is_broken = True
        if connection in self.connections:
            self.connections.remove(connection)
        self.counts["connections that broke"] += 1
        self._clock.after(worker_s, self._tell, connection)
        self._clock.after(server_s, self._end, connection)

    def _tell(self, connection: Connection) -> None:
        socket = connection.socket
        if not (socket.peer.is_dead or socket.is_closed):
            socket.peer.lost(socket)

    def _end(self, connection: Connection) -> None:
        connection.is_broken = True
        if connection.server.is_up:
            connection.server.ended(connection)

    def between(self, rank: int | None, server: int | None) -> list[Connection]:
        """Connections between a worker and a server; None: any."""
        return [one for one in self.connections if rank in (None, one.rank) and server in (None, one.server.host)]

    # ---- cuts --------------------------------------------------------------------------------------------------

    def begin(self, cut: Cut) -> None:
        """A link is cut."""
        self.cuts.append(cut)
        self._clock.after(self._lease_s, self._outlast, cut)

    def _outlast(self, cut: Cut) -> None:
        if cut in self.cuts:
            for one in [one for one in self.connections if cut.covers(one.rank, one.server.host)]:
                self.drop(one, worker_s=self._rng.random() * 0.2, server_s=self._rng.random() * 0.2)

    def end(self, cut: Cut, *, loses: bool) -> None:
        """A cut ends: what waited arrives, or its connections break."""
        self.cuts.remove(cut)
        for one in [one for one in self.connections if any(one.held)]:
            if loses:
                self.drop(one, worker_s=self._rng.random() * 0.2, server_s=self._rng.random() * 0.2)
                continue
            for direction in (UP, DOWN):
                frames, one.held[direction][:] = list(one.held[direction]), []
                for each in frames:
                    self.carry(one, direction, each)

    # ---- frames ------------------------------------------------------------------------------------------------

    def carry(self, connection: Connection, direction: int, frames: list[bytes]) -> None:
        """Take a message on its way."""
        if connection.is_broken:
            self._count_lost(frames)
            return
        is_cut = any(cut.covers(connection.rank, connection.server.host, direction) for cut in self.cuts)
        if is_cut or connection.held[direction]:
            connection.held[direction].append(frames)
            return
        delay_s = connection.delay_s * (0.5 + self._rng.random())
        connection.last_s[direction] = max(connection.last_s[direction], self._clock.now_s + delay_s)
        self._clock.at(connection.last_s[direction], self._arrive, connection, direction, frames)

    def _arrive(self, connection: Connection, direction: int, frames: list[bytes]) -> None:
        if connection.is_broken:
            self._count_lost(frames)
        elif direction == UP:
            if connection.server.is_up:
                connection.server.receive(connection, frames)
        elif not (connection.socket.peer.is_dead or connection.socket.is_closed):
            connection.socket.peer.receive(connection.socket, frames)

    def _count_lost(self, frames: list[bytes]) -> None:
        kind = MessageType(frames[0][TYPE_OFFSET])
        self.counts[f"{kind.name} lost" if kind in COUNTED else "others lost"] += 1

    def _delay_s(self) -> float:
        low, high = self._latency_s
        return low + (high - low) * self._rng.random() ** 3


def rank_of(host: int) -> int:
    """In the place of a worker's rank, where a server follows another."""
    return -1 - host


def place_of(address: str) -> tuple[int, int]:
    """(host, shard) of an address."""
    host, _, shard = address.removeprefix("tcp://10.0.0.").partition(":")
    return int(host), int(shard)


def copied(frames: Iterable[Any]) -> list[Any]:
    """Frames in memory of their own, writable as those of pyzmq."""
    return [memoryview(bytearray(frame)) for frame in frames]
