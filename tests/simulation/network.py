"""Connections between workers and shards: what TCP under ZeroMQ can do, and what a bad proxy can do besides.

    worker ── socket (a DEALER) ── wire 17 (a connection) ── shard          frames of a wire arrive in order, or
                    └───────────── wire 23, once 17 is lost                 never, or after frames of a later wire

A wire that breaks takes along what is under way. What a worker sent before may still arrive: its kernel goes on sending
for a closed socket. Until a worker notices, it sends to nobody. ``Noise`` drops, doubles and reorders frames of one
wire.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from simulation.clock import Clock

if TYPE_CHECKING:
    from simulation.server import ServerProcess
    from simulation.worker import WorkerProcess

UP, DOWN = 0, 1
RECONNECT_S = 0.05


@dataclass(eq=False)
class Wire:
    """One connection: ``route`` is its routing id at the shard."""

    socket: Socket
    server: ServerProcess
    shard: int
    route: bytes
    is_broken: bool = False
    delivers_late: bool = False  # frames of the worker that were under way when it broke
    last_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    held: tuple[list[list[bytes]], list[list[bytes]]] = field(default_factory=lambda: ([], []))


class Socket:
    """A worker's end: it has a wire, or looks for one."""

    def __init__(self, network: Network, process: WorkerProcess, index: int, server: int, shard: int) -> None:
        self.process, self.index, self.server, self.shard = process, index, server, shard
        self.wire: Wire | None = None
        self.is_new = False  # the receiver has not heard of the wire
        self._network = network

    def send(self, frames: list[bytes]) -> bool:
        """Send a message; False without a wire."""
        if self.wire is None:
            return False
        self._network.carry(self.wire, UP, frames)
        return True


@dataclass(frozen=True)
class Noise:
    """For a while frames are lost, doubled, or overtake each other, with these probabilities."""

    drops: float
    doubles: float
    reorders: float


@dataclass(frozen=True)
class Cut:
    """Nothing arrives between a worker and a server, in one direction or both; None: any worker, any server."""

    rank: int | None
    server: int | None
    directions: tuple[int, ...]

    def covers(self, wire: Wire, direction: int) -> bool:
        return (
            direction in self.directions
            and self.rank in (None, wire.socket.process.rank)
            and self.server in (None, wire.server.index)
        )


class Network:
    """See the module's text.

    Args:
        latency_s: the shortest and the longest time that a frame takes.
    """

    def __init__(self, clock: Clock, rng: random.Random, latency_s: tuple[float, float]) -> None:
        self._clock, self._rng, self._latency_s = clock, rng, latency_s
        self.servers: list[ServerProcess] = []
        self.noises: list[Noise] = []
        self.cuts: list[Cut] = []
        self.wires: list[Wire] = []
        self.counts: Counter[str] = Counter()
        self._count = 0

    # ---- connections -------------------------------------------------------------------------------------------

    def open(self, process: WorkerProcess, index: int, server: int, shard: int) -> Socket:
        """A socket that begins to connect."""
        socket = Socket(self, process, index, server, shard)
        self._clock.after(self._delay_s(), self._connect, socket)
        return socket

    def _connect(self, socket: Socket) -> None:
        if socket.process.is_dead or socket.wire is not None:
            return
        server = self.servers[socket.server]
        is_cut = any(
            cut.rank in (None, socket.process.rank) and cut.server in (None, socket.server) for cut in self.cuts
        )
        if not server.is_up or server.is_paused or is_cut:
            self._clock.after(RECONNECT_S * (1 + self._rng.random() * 9), self._connect, socket)
            return
        self._count += 1
        wire = Wire(socket, server, socket.shard, f"{self._count}".encode())
        self.wires.append(wire)
        server.wires[wire.route] = wire
        socket.wire, socket.is_new = wire, True

    def break_wire(self, wire: Wire, *, delivers_late: bool, notices_after_s: float) -> None:
        """The connection ends; the worker sees that later, the shard never does."""
        if wire.is_broken:
            return
        wire.is_broken, wire.delivers_late = True, delivers_late
        self.wires.remove(wire)
        for direction in (UP, DOWN):
            frames, wire.held[direction][:] = list(wire.held[direction]), []
            if direction == UP and delivers_late:
                for one in frames:
                    self._carry_at(wire, UP, one, self._clock.now_s + self._delay_s())
        self._clock.after(notices_after_s, self._notice, wire)

    def _notice(self, wire: Wire) -> None:
        if wire.socket.wire is wire:
            wire.socket.wire = None
            self._clock.after(RECONNECT_S * (1 + self._rng.random()), self._connect, wire.socket)

    def wires_of(self, rank: int | None, server: int | None) -> list[Wire]:
        """Connections between a worker and a server; None: any."""
        return [
            wire
            for wire in self.wires
            if rank in (None, wire.socket.process.rank) and server in (None, wire.server.index)
        ]

    def release(self, cut: Cut, *, loses: bool) -> None:
        """A cut ends: what it held arrives, or, where connections did not outlive it, never does."""
        self.cuts.remove(cut)
        for wire in list(self.wires):
            for direction in (UP, DOWN):
                if not wire.held[direction] or any(other.covers(wire, direction) for other in self.cuts):
                    continue
                if loses:
                    self.break_wire(wire, delivers_late=False, notices_after_s=self._delay_s())
                    break
                frames, wire.held[direction][:] = list(wire.held[direction]), []
                for one in frames:
                    self.carry(wire, direction, one)

    # ---- frames ------------------------------------------------------------------------------------------------

    def carry(self, wire: Wire, direction: int, frames: list[bytes]) -> None:
        """Take a message on its way."""
        if wire.is_broken:
            self.counts["lost with a connection"] += 1
            return
        if self.cuts and any(cut.covers(wire, direction) for cut in self.cuts):
            wire.held[direction].append(frames)
            self.counts["held"] += 1
            return
        arrives_s = max(wire.last_s[direction], self._clock.now_s + self._delay_s())
        for noise in () if wire.socket.process.segments is not None else self.noises:  # their bytes keep their order
            draw = self._rng.random()
            if draw < noise.drops:
                self.counts["dropped"] += 1
                return
            draw -= noise.drops
            if draw < noise.doubles:
                self.counts["doubled"] += 1
                self._carry_at(wire, direction, frames, arrives_s + self._rng.random())
            elif draw - noise.doubles < noise.reorders:
                self.counts["reordered"] += 1
                self._carry_at(wire, direction, frames, arrives_s + self._rng.random())
                return
        wire.last_s[direction] = arrives_s
        self._clock.at(arrives_s, self._arrive, wire, direction, frames)

    def _carry_at(self, wire: Wire, direction: int, frames: list[bytes], time_s: float) -> None:
        self._clock.at(time_s, self._arrive, wire, direction, frames)

    def _arrive(self, wire: Wire, direction: int, frames: list[Any]) -> None:
        if direction == UP:
            if wire.is_broken and not wire.delivers_late:
                self.counts["lost with a connection"] += 1
            elif wire.server.is_up:
                wire.server.receive(wire, frames)
        elif not wire.is_broken and wire.socket.wire is wire:
            wire.socket.process.receive(wire.socket.index, frames)

    def _delay_s(self) -> float:
        low, high = self._latency_s
        return low + (high - low) * self._rng.random() ** 3
