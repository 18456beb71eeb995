"""A server that follows another: what it has in the place of sockets, and of the thread that asks its elector."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from psengine.parameter_server.server.replication.election import Member
from psengine.parameter_server.server.replication.pair import Pair
from psengine.parameter_server.server.replication.succession import Succession
from simulation.network import UP, Socket, copied, place_of, rank_of


class FollowingEnd:
    """The ``Transport`` of a process to its leader, and what drives its ``Pair``.

    Args:
        server: the process.
        previous: the life whose log it has read; 0 without one.
    """

    def __init__(self, server, addresses: Sequence[str], previous: int) -> None:
        self.server, self.rank = server, rank_of(server.host)
        scenario = server.world.scenario
        self._sockets: dict[int, Socket] = {}
        self._unsent: dict[int, list[list[Any]]] = {}
        own, is_second = Member(server.epoch, tuple(addresses), previous), server.host >= scenario.servers
        first = f"tcp://10.0.0.{server.index}:0"
        succession = Succession(own, lease_s=scenario.lease_s, follow=first if is_second else "")
        self.pair = Pair(
            succession,
            self,
            server.threads,
            lease_s=scenario.lease_s,
            prepare=server.prepare,
            lead=server.lead,
            begin_anew=lambda why: self._give_up(),
            note=lambda kind, text: None,
        )
        self.gives_up = False

    def _give_up(self) -> None:
        """What is here is thrown away."""
        self.gives_up = True
        self.server.clock.after(0.0, self.server.world.end_server, self.server)

    @property
    def is_dead(self) -> bool:
        """The process has ended."""
        return not self.server.is_up

    def look(self) -> None:
        """Something has come, or time has passed."""
        server, succession = self.server, self.pair.succession
        self.pair.tick(server.clock.now_s)
        if server.is_up and (question := succession.next(server.clock.now_s)) is not None:
            server.world.electors[server.index].ask(server, question)

    def elected(self, question: Any, answer: Any) -> None:
        """The elector has answered, or not."""
        self.pair.succession.heard(question, answer, self.server.clock.now_s)
        self.look()

    # ---- connections -------------------------------------------------------------------------------------------

    def open(self, shard: int, address: str) -> None:
        self._sockets[shard] = socket = Socket(self, shard, *place_of(address))
        self._unsent[shard] = []
        self.server.world.network.connect(socket)

    def opened(self, socket: Socket) -> None:
        """It is there."""
        for frames in self._unsent.pop(socket.channel, []):
            self.server.world.network.carry(socket.connection, UP, frames)

    def send(self, shard: int, frames: Sequence[Any]) -> None:
        socket, copy = self._sockets.get(shard), copied(frames)
        if socket is not None and socket.connection is not None:
            self.server.world.network.carry(socket.connection, UP, copy)
        elif shard in self._unsent:
            self._unsent[shard].append(copy)

    def close(self) -> None:
        sockets, self._sockets = self._sockets, {}
        self._unsent.clear()
        for socket in sockets.values():
            self.server.world.network.close(socket)

    def lost(self, socket: Socket) -> None:
        """It has ended, or could not be made."""
        socket.connection = None
        self.server.happens(partial(self._lost, socket))

    def _lost(self, socket: Socket) -> None:
        if self._sockets.get(socket.channel) is socket:
            self.pair.disconnected(socket.channel)
            self.look()

    def receive(self, socket: Socket, frames: list[bytes]) -> None:
        """A message came."""
        self.server.happens(partial(self._receive, socket, frames))

    def _receive(self, socket: Socket, frames: list[bytes]) -> None:
        if self._sockets.get(socket.channel) is socket:
            world = self.server.world
            world.clock.note("to follower", self.rank, socket.channel, bytes(frames[0][:72]))
            world.faults.noticed("RECORD")
            self.pair.received(socket.channel, frames, world.clock.now_s)
            self.look()
