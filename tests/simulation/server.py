"""One life of a server process: ``psengine-server`` without threads and sockets.

What a shard's thread does with a message, and with what shard and coordinators say, is the real ``ShardThread``: its
methods are called here, and it never runs.
"""

from __future__ import annotations

import math
import random
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
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
from simulation.following import FollowingEnd
from simulation.network import DOWN, TYPE_OFFSET, Connection, copied
from simulation.segments import PART
from simulation.violation import Violation

# What the wall clock of a server shows at the simulated time 0.
WALL_S = 1.7e9
# How long a shard's thread takes to do what another thread asks for.
LATE_S = (0.0, 0.005, 0.05)
FIRST_S = 1.0  # those that begin until then were there long before
# Of each shard, unless a scenario has less.
MOST_BYTES = 1 << 30
LIKE_ALL: dict[str, Any] = {"keep_history": False, "plugins": []}


class ServerProcess:
    """See the module's text.

    Args:
        world: whose ``trainings`` and ``faults`` are told what happens.
        host: of the process among all; its next life has the same.
        addresses: of its shards.
        wrong_s: how wrong its wall clock is.

    Attributes:
        index: of the server among all; its follower has the same.
        is_up: it has not been killed.
        is_paused: it neither reads nor answers; messages wait.
        connections: by routing id.
    """

    def __init__(self, world, host: int, addresses: list[str], wrong_s: float) -> None:
        self.world, self.clock, self.host = world, world.clock, host
        self.index = host % world.scenario.servers
        self.is_up, self.is_paused = True, False
        self.late_s = LATE_S[host % len(LATE_S)]
        self.connections: dict[bytes, Connection] = {}
        self.snapshots = None
        self._waiting: list[Callable[[], None]] = []
        scenario, clock = world.scenario, world.clock
        self._rng = random.Random(f"server {scenario.seed} {host} {clock.now_s}")
        self._wrong_s = wrong_s
        # By this machine's clock. Servers begin 16 us apart: incarnations count up from it.
        self.epoch = (int(self._wall_s() * 1e6) + 16 * host) << 10 | self._rng.getrandbits(10)
        most_bytes = scenario.follower_bytes if host >= scenario.servers else None
        if scenario.room is not None:
            most_bytes = int(scenario.room * sum(spec.size_bytes for spec in world.training.job.specs))
        most_bytes = MOST_BYTES if most_bytes is None else most_bytes
        self._settings = settings = ShardSettings(
            lease_s=scenario.lease_s,
            heartbeat_s=scenario.heartbeat_s,
            max_memory_bytes=most_bytes,
            durability=scenario.durability,
            keeps_updates=scenario.keeps_updates,
            likeness={"durability": scenario.durability, "max_memory_bytes": most_bytes, **LIKE_ALL},
        )
        self.coordinators = self._make_coordinators()
        self.shards = [
            Shard(number, self.epoch, settings, _ignore, self.connections.__contains__)
            for number in range(len(addresses))
        ]
        self.addresses = addresses
        self.threads: list[SimulatedThread] = []
        self.following: FollowingEnd | None = None  # of a server that has a follower, or is one
        if not scenario.has_followers:
            self._make_threads()

    def _make_threads(self) -> None:
        with shard_thread_time(self.world):
            self.threads.extend(SimulatedThread(self, shard, self.addresses) for shard in self.shards)

    def _wall_s(self) -> float:
        return WALL_S + self._wrong_s + self.clock.now_s  # type: ignore[no-any-return]

    @property
    def life(self) -> int:
        """What the elector knows it by."""
        return self.epoch if self.following is None else self.following.pair.succession.own.epoch

    def _make_coordinators(self) -> Coordinators:
        rng, is_connected = self._rng, self.connections.__contains__
        around = Interfaces(
            self.epoch,
            self._settings,
            self._wall_s,
            _ignore,
            lambda: rng.randbytes(32),
            is_connected=is_connected,
            started_s=self.clock.now_s if self.clock.now_s > FIRST_S else -math.inf,
        )
        return Coordinators(around)

    # ---- life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Restore snapshots, if any, and begin to tick."""
        self.clock.note("server starts", self.host, self.epoch)
        known = {} if self.snapshots is None else self.snapshots.restore()
        if self.world.scenario.has_followers:
            previous = 0 if self.snapshots is None else self.snapshots.previous
            self.following = FollowingEnd(self, self.addresses, previous)
            self._make_threads()
        self.threads[0].known = known
        if self.following is not None:
            self.following.look()
        else:
            self.lead(self.epoch, self.clock.now_s)
        for thread in self.threads if self.snapshots is not None and not self.world.scenario.keeps_log else ():
            thread.snapshot = self.snapshots.wish
        self.clock.after(self.world.scenario.tick_s, self._tick)

    def prepare(self, epoch: int, is_copy: bool) -> bool:
        """What is here gets a log, under this epoch; whether it has one."""
        if self.snapshots is not None and not self.snapshots.logs:
            for thread in self.threads:
                thread.catch_up()
            self.epoch = epoch
            return self.world.begin_logs(self, is_copy=is_copy)  # type: ignore[no-any-return]
        return True

    def lead(self, epoch: int, now_s: float) -> None:
        """The shards go on with what is here."""
        self.epoch = epoch
        self.coordinators = self._make_coordinators()
        for thread in self.threads:
            thread.catch_up()
            thread.lead(epoch, now_s, None if thread.shard.index else self.coordinators)
        self.world.leads(self)

    def kill(self) -> None:
        """The process ends at once."""
        self.clock.note("server dies", self.host)
        self.is_up = False
        if self.snapshots is not None:
            self.snapshots.kill()
        self._waiting.clear()
        self.release()

    def release(self) -> None:
        """Close what the operating system gave it; nothing is sent any more."""
        threads, self.threads = self.threads, []
        if self.following is not None:
            self.following.close()
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
        for call in waiting:
            self.happens(call)

    def happens(self, call: Callable[[], None]) -> None:
        """Something comes: now, or once the process goes on."""
        if self.is_paused:
            self._waiting.append(call)
        elif self.is_up:
            call()

    def _tick(self) -> None:
        if self.is_up:
            if not self.is_paused:
                self._look()
            self.clock.after(self.world.scenario.tick_s, self._tick)

    def _look(self) -> None:
        for thread in self.threads:
            thread.tick()
        if self.following is not None:
            self.following.look()
        if self.snapshots is not None and self.is_up and (self.following is None or self.snapshots.logs):
            self.snapshots.tick()

    # ---- messages ----------------------------------------------------------------------------------------------

    def receive(self, connection: Connection, frames: list[bytes]) -> None:
        """A message came from a worker, or from who follows."""
        self.happens(lambda: self.threads[connection.socket.shard].take(connection.route, frames))

    def ended(self, connection: Connection) -> None:
        """A connection is gone. What came before may still be read."""
        self.connections.pop(connection.route, None)

    def evict(self, job: str, rank: int) -> None:
        """An operator puts a worker out."""
        if self.is_up and not self.is_paused:
            self.threads[0].told_to_evict(job, rank)

    def transmit(self, route: bytes, frames: list[Any]) -> None:
        """A message leaves: from here on its worker may know what it says."""
        if frames[0][TYPE_OFFSET] == MessageType.UPDATED:
            for part in split(frames):
                message = decode(part)
                self.world.training_of(message.job).job.told(self, message)
        connection = self.connections.get(route)
        if connection is not None:
            self.world.network.carry(connection, DOWN, frames)


class SimulatedThread(shard_thread.ShardThread):
    """A shard's thread that does not run."""

    def __init__(self, server: ServerProcess, shard: Shard, addresses: list[str]) -> None:
        self._server = server
        self._asked_by: Message | None = None
        self._late: deque[Callable[[], None]] = deque()
        pair = None if server.following is None else server.following.pair
        super().__init__(
            shard,
            _Endpoint(server, addresses[shard.index]),  # type: ignore[arg-type]
            addresses,
            on_admin=_ignore,
            pair=pair,
        )
        shard.apply = self._watched(shard.apply)  # type: ignore[method-assign]

    def _watched(self, apply: Callable[[Message, Sender], list[Outgoing]]) -> Callable[..., list[Outgoing]]:
        def watched(message: Message, sender: Sender) -> list[Outgoing]:
            outgoing = apply(message, sender)
            world = self._server.world
            is_newest = world.leaders.get(self._server.index) is self._server
            for training in world.trainings if self.leads else ():  # else it is another's record
                if is_newest:
                    training.views.applied(self._server, self.shard)
                if training.number == message.job and (is_newest or training.job.hears_former):
                    training.job.applied(self._server, self.shard, message, outgoing)
            return outgoing

        return watched

    def ask(self, function: Callable[[], Any]) -> Future[Any]:
        """A little later, in order."""
        future: Future[Any] = Future()

        def call() -> None:
            try:
                future.set_result(function())
            except Violation:
                raise
            except Exception as error:
                future.set_exception(error)

        self._late.append(call)
        self._server.clock.after(self._server.late_s, self._server.happens, self._call_next)
        return future

    def _call_next(self) -> None:
        if self._late:
            self._late.popleft()()

    def catch_up(self) -> None:
        """Do what was asked for."""
        while self._late:
            self._call_next()

    def take(self, route: bytes, frames: list[bytes]) -> None:
        """A message came."""
        world = self._server.world
        world.clock.note_message("to shard", (self._server.host, self.shard.index), frames)
        world.faults.noticed(MessageType(frames[0][TYPE_OFFSET]).name)
        self._asked_by = None
        self._take(Received(route, "", frames, PART))
        self._send_group()

    def _handle(self, sender: Sender, message: Message) -> None:
        self._asked_by = message
        super()._handle(sender, message)

    def tick(self) -> None:
        """Some time has passed."""
        self._asked_by = None
        self.release()
        self._tick()
        self._send_group()

    def told_to_evict(self, job: str, rank: int) -> None:
        """An operator puts a worker out."""
        self._asked_by = None
        self.evict(job, rank)

    def release(self) -> None:
        """The log is further."""
        try:
            self.answers.release()
        except LogFailedError:
            return

    def _send_decided(self, outgoing: list[Outgoing], *, is_heartbeat: bool = False) -> None:
        world = self._server.world
        if world.leaders[self._server.index] is self._server:
            for training in world.trainings:
                said = [one for one in outgoing if one.message.job == training.number]
                if self._asked_by is None or self._asked_by.job == training.number:
                    training.views.coordinated(self._server, self._asked_by, said)
                    training.job.coordinated(self._server, self._asked_by, said)
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
        self.peers = SimpleNamespace(look=lambda: None, is_connected=server.connections.__contains__)

    def may_follow(self, received: Received) -> bool:
        return True

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
