"""One life of a server process: ``psengine-server`` without threads and sockets.

What a shard's thread does with a message, and with what shard and coordinators say, is the real ``ShardThread``: its
methods are called here, and it never runs.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

from psengine.parameter_server.server.coordinator.coordinator import Interfaces
from psengine.parameter_server.server.coordinator.coordinators import Coordinators
from psengine.parameter_server.server.interfaces import Outgoing, Sender, ShardSettings
from psengine.parameter_server.server.shard.shard import Shard
from psengine.parameter_server.server.transport import shard_thread
from psengine.parameter_server.server.transport.endpoint import Received
from psengine.parameter_server.server.transport.shard_thread import LogFailedError
from psengine.protocol.frames import decode, split
from psengine.protocol.messages import Message, MessageType
from simulation.network import DOWN, TYPE_OFFSET, Connection, copied
from simulation.segments import PART
from simulation.violation import Violation

# What the wall clock of a server shows at the simulated time 0.
WALL_S = 1.7e9


class ServerProcess:
    """See the module's text.

    Args:
        world: whose ``views``, ``job`` and ``faults`` are told what happens.
        index: of the server among all; its next life has the same.
        addresses: of its shards.
        wrong_s: how wrong its wall clock is.

    Attributes:
        is_up: it has not been killed.
        is_paused: it neither reads nor answers; messages wait.
        connections: by routing id.
    """

    def __init__(self, world, index: int, addresses: list[str], wrong_s: float) -> None:
        self.world, self.clock, self.index = world, world.clock, index
        self.is_up, self.is_paused = True, False
        self.connections: dict[bytes, Connection] = {}
        self.snapshots = None
        self._waiting: list[tuple[Connection, list[bytes]]] = []
        scenario, clock = world.scenario, world.clock
        rng = random.Random(f"server {scenario.seed} {index} {clock.now_s}")
        self.epoch = int((WALL_S + wrong_s + clock.now_s) * 1e6) << 10 | rng.getrandbits(6) << 4 | index
        settings = ShardSettings(
            lease_s=scenario.lease_s,
            heartbeat_s=scenario.heartbeat_s,
            durability=scenario.durability,
        )
        around = Interfaces(
            self.epoch,
            settings,
            lambda: WALL_S + wrong_s + clock.now_s,
            _ignore,
            lambda: rng.randbytes(32),
            is_connected=self.connections.__contains__,
        )
        self.coordinators = Coordinators(around)
        self.shards = [
            Shard(number, self.epoch, settings, _ignore, self.connections.__contains__)
            for number in range(len(addresses))
        ]
        with shard_thread_time(world):
            self.threads = [SimulatedThread(self, shard, addresses) for shard in self.shards]

    # ---- life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Restore snapshots, if any, and begin to tick."""
        self.clock.note("server starts", self.index, self.epoch)
        if self.snapshots is not None:
            self.snapshots.restore()
        self.world.views.server_started(self)
        self.world.job.server_started(self)
        self.clock.after(self.world.scenario.tick_s, self._tick)

    def kill(self) -> None:
        """The process ends at once."""
        self.clock.note("server dies", self.index)
        self.is_up = False
        if self.snapshots is not None:
            self.snapshots.kill()
        self._waiting.clear()
        self.release()

    def release(self) -> None:
        """Close what the operating system gave it; nothing is sent any more."""
        threads, self.threads = self.threads, []
        for thread in threads:
            thread.answers.close()

    def pause(self) -> None:
        """Stop, as by SIGSTOP."""
        self.is_paused = True

    def resume(self) -> None:
        """Go on: time has leapt."""
        if not self.is_up or not self.is_paused:
            return
        self.is_paused = False
        # A process that goes on may look at the time first, or at its messages.
        if self.epoch & 0x10:
            self._look()
        waiting, self._waiting = self._waiting, []
        for connection, frames in waiting:
            self.receive(connection, frames)

    def _tick(self) -> None:
        if self.is_up:
            if not self.is_paused:
                self._look()
            self.clock.after(self.world.scenario.tick_s, self._tick)

    def _look(self) -> None:
        for thread in self.threads:
            thread.tick()
        if self.snapshots is not None and self.is_up:
            self.snapshots.tick()

    # ---- messages ----------------------------------------------------------------------------------------------

    def receive(self, connection: Connection, frames: list[bytes]) -> None:
        """A message came from a worker."""
        if self.is_paused:
            self._waiting.append((connection, frames))
        elif self.is_up:
            self.threads[connection.socket.shard].take(connection.route, frames)

    def ended(self, connection: Connection) -> None:
        """A connection is gone. What came before may still be read."""
        self.connections.pop(connection.route, None)

    def evict(self, rank: int) -> None:
        """An operator puts a worker out."""
        if self.is_up and not self.is_paused:
            self.threads[0].evict("job", rank)

    def transmit(self, route: bytes, frames: list[Any]) -> None:
        """A message leaves: from here on its worker may know what it says."""
        if frames[0][TYPE_OFFSET] == MessageType.UPDATED:
            for part in split(frames):
                self.world.job.told(self, decode(part))
        connection = self.connections.get(route)
        if connection is not None:
            self.world.network.carry(connection, DOWN, frames)


class SimulatedThread(shard_thread.ShardThread):
    """A shard's thread that does not run."""

    def __init__(self, server: ServerProcess, shard: Shard, addresses: list[str]) -> None:
        self._server = server
        self._asked_by: Message | None = None
        super().__init__(
            shard,
            _Endpoint(server, addresses[shard.index]),  # type: ignore[arg-type]
            addresses,
            coordinators=server.coordinators if shard.index == 0 else None,
            on_admin=_ignore,
        )
        shard.apply = self._watched(shard.apply)  # type: ignore[method-assign]

    def _watched(self, apply: Callable[[Message, Sender], list[Outgoing]]) -> Callable[..., list[Outgoing]]:
        def watched(message: Message, sender: Sender) -> list[Outgoing]:
            outgoing = apply(message, sender)
            if self._server.threads:  # else a log is being replayed
                world = self._server.world
                world.views.applied(self._server, self.shard)
                world.job.applied(self._server, self.shard, message, outgoing)
            return outgoing

        return watched

    def take(self, route: bytes, frames: list[bytes]) -> None:
        """A message came."""
        message, world = decode(frames), self._server.world
        world.clock.note_message("to shard", (self._server.index, self.shard.index), frames[0], message)
        world.faults.noticed(message.type.name)
        self._asked_by = message
        self._take(Received(route, "", frames, PART))
        self._send_group()

    def tick(self) -> None:
        """Some time has passed."""
        self._asked_by = None
        self._tick()
        self._send_group()

    def release(self) -> None:
        """The log is further."""
        try:
            self.answers.release()
        except LogFailedError:
            return

    def _send_decided(self, outgoing: list[Outgoing], *, is_heartbeat: bool = False) -> None:
        world = self._server.world
        world.views.coordinated(self._server, outgoing)
        world.job.coordinated(self._server, self._asked_by, outgoing)
        world.faults.coordinated(self._server)
        super()._send_decided(outgoing, is_heartbeat=is_heartbeat)

    def _report_failure(self, what: str) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, Violation):
            raise error
        raise Violation(f"the server failed on {what}: {error!r}") from error


class _Endpoint:
    """In the place of a real one: what answers leave by."""

    def __init__(self, server: ServerProcess, address: str) -> None:
        self._server, self.address = server, address
        self.peers = SimpleNamespace(look=lambda: None)

    def send(self, route: bytes, frames: Any, *, copies: bool = True) -> None:
        frames = copied(frames)
        self._server.clock.note("sent", route, bytes(frames[0][:72]))
        self._server.transmit(route, frames)


def shard_thread_time(world) -> ExitStack:
    """Inside, threads of shards have the simulated time."""
    clock, stack = world.clock, ExitStack()
    time = SimpleNamespace(monotonic=lambda: clock.now_s, perf_counter=lambda: clock.now_s)
    stack.enter_context(mock.patch.object(shard_thread, "time", time))
    return stack


def _ignore(*_: Any, **__: Any) -> None:
    """Events are for people."""
