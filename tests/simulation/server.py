"""One life of a server process: shards, ticks, snapshots. ``psengine-server`` without threads and sockets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from psengine.errors import ProtocolError
from psengine.parameter_server.server.interfaces import Clocks, Outgoing, Sender, ShardSettings
from psengine.parameter_server.server.core.shard import Shard
from psengine.parameter_server.server.transport.held_answers import HeldAnswers
from psengine.parameter_server.server.transport.segments import ShardSegments
from psengine.parameter_server.server.transport.shard_thread import _SAYS_NOTHING_NEW
from psengine.protocol.frames import decode, encode, refusal
from psengine.protocol.messages import Message, MessageType
from simulation.clock import Clock
from simulation.network import DOWN, Network, Wire
from simulation.snapshots import Snapshots, snapshot_answer

# What the wall clock of a server shows at the simulated time 0.
WALL_S = 1.7e9
_TYPE_OFFSET = 6  # in a header


class ServerWitness(Protocol):
    """The oracle's view of a server."""

    def server_started(self, server: ServerProcess, note: Any) -> None:
        """A life begins; what it restored is in its shards. ``note``: see ``SnapshotWitness.captured``."""

    def before(self, server: ServerProcess, shard: Shard, message: Message) -> None:
        """A message arrived."""

    def after(self, server: ServerProcess, shard: Shard, message: Message | None, outgoing: list[Outgoing]) -> None:
        """The shard has answered ``message``; None: time has passed."""

    def told(self, server: ServerProcess, message: Message) -> None:
        """An answer to a push leaves the server."""


class _Exit(NamedTuple):
    """In the place of an ``Endpoint``: what answers leave by."""

    send: Callable[..., None]


class ServerProcess:
    """See the module's text.

    Args:
        index: of the server among all; its next life has the same.
        epoch: the life's random number.
        wall_s: how wrong its wall clock is.

    Attributes:
        is_up: it has not been killed.
        is_paused: it neither reads nor answers; messages wait.
        pauses: when each pause that is over began and ended.
        wires: by routing id, the connections that it knows.
        segments: of each shard, the memory that workers share with it.
        failures: what it would have logged as its own bugs.
    """

    def __init__(
        self,
        clock: Clock,
        network: Network,
        witness: ServerWitness,
        index: int,
        addresses: list[str],
        epoch: int,
        settings: ShardSettings,
        wall_s: float,
        tick_s: float,
    ) -> None:
        self.clock, self.network, self.witness, self.index = clock, network, witness, index
        self.is_up, self.is_paused = True, False
        self.pauses: list[tuple[float, float]] = []
        self._paused_s = 0.0
        self.wires: dict[bytes, Wire] = {}
        self.snapshots: Snapshots | None = None
        self._waiting: list[tuple[Wire, list[bytes]]] = []
        self._tick_s = tick_s
        clocks = Clocks(wall_s=lambda: WALL_S + wall_s + clock.now_s, measure_s=lambda: clock.now_s)
        self.shards = [Shard(number, epoch, settings, clocks) for number in range(len(addresses))]
        self.segments = [ShardSegments() for _ in addresses]
        exit_ = _Exit(self._transmit)
        self.answers = [HeldAnswers(exit_) for _ in self.shards]  # type: ignore[arg-type]
        for shard in self.shards:
            shard.shard_addresses = addresses

    @property
    def epoch(self) -> int:
        """The life's number."""
        return self.shards[0].epoch

    @property
    def has_values(self) -> bool:
        """Whether every shard has a job whose values are there."""
        return all(any(job.is_sealed for job in shard.jobs.by_number.values()) for shard in self.shards)

    def has_met(self, rank: int) -> bool:
        """Whether every shard has a job that this worker has taken part in."""
        return all(any(rank in job.came for job in shard.jobs.by_number.values()) for shard in self.shards)

    def start(self) -> None:
        """Begin to tick; snapshots, if any, are restored."""
        self.clock.note("server starts", self.index, self.epoch)
        restored = None if self.snapshots is None else self.snapshots.restore()
        self.witness.server_started(self, restored)
        self.clock.after(self._tick_s, self._tick)

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
        for answers in self.answers:
            answers.close()

    def pause(self) -> None:
        """Stop, as by SIGSTOP."""
        if not self.is_paused:
            self.is_paused, self._paused_s = True, self.clock.now_s

    def resume(self) -> None:
        """Go on: time has leapt."""
        if not self.is_up or not self.is_paused:
            return
        self.is_paused = False
        self.pauses.append((self._paused_s, self.clock.now_s))
        waiting, self._waiting = self._waiting, []
        for wire, frames in waiting:
            self.receive(wire, frames)

    def receive(self, wire: Wire, frames: list[bytes]) -> None:
        """A message came from a worker."""
        if self.is_paused:
            self._waiting.append((wire, frames))
            return
        shard = self.shards[wire.shard]
        try:
            message = decode(frames)
            self.clock.note_message("to shard", (self.index, wire.shard), frames[0], message)
            if message.type is MessageType.PUSH:
                self.segments[wire.shard].find(message)
            self.witness.before(self, shard, message)
            outgoing = shard.handle(Sender(wire.route, ""), message, self.clock.now_s)
        except ProtocolError as error:
            answer = refusal(frames, error)
            if answer is not None:
                answer.epoch = self.epoch
                self._send([Outgoing(wire.route, answer)], shard)
            return
        self.witness.after(self, shard, message, outgoing)
        self._send(outgoing, shard, may_share=message.type is not MessageType.REPEAT)

    def _tick(self) -> None:
        if not self.is_up:
            return
        if not self.is_paused:
            for shard in self.shards:
                outgoing = shard.tick(self.clock.now_s)
                self.witness.after(self, shard, None, outgoing)
                self._send(outgoing, shard)
                self.segments[shard.index].keep_members(shard)
            if self.snapshots is not None:
                self.snapshots.tick()
        self.clock.after(self._tick_s, self._tick)

    def answer_snapshot(self, route: bytes, message: Message, generation: int | None) -> None:
        """A snapshot that a worker asked for was written, or not."""
        answer = snapshot_answer(message, self.epoch, generation)
        self._send([Outgoing(route, answer)], self.shards[0])

    def _send(self, outgoing: list[Outgoing], shard: Shard, *, may_share: bool = True) -> None:
        segments = self.segments[shard.index]
        for one in outgoing:
            if one.message.type is MessageType.WELCOME:
                segments.sign(one.message)
            elif one.message.type is MessageType.UPDATED and may_share and segments.put(one.message, one.pins):
                self.network.counts["answers in shared memory"] += 1
            frames = [bytes(frame) for frame in encode(one.message)]
            self.clock.note_message("from shard", (self.index, shard.index), frames[0], one.message)
            is_urgent = one.message.type in _SAYS_NOTHING_NEW
            self.answers[shard.index].send(one.route, frames, is_urgent=is_urgent)

    def _transmit(self, route: bytes, frames: list[bytes], *, copies: bool = True) -> None:
        """A message leaves: from here on its worker may know what it says."""
        if frames[0][_TYPE_OFFSET] == MessageType.UPDATED:
            self.witness.told(self, decode(frames))
        wire = self.wires.get(route)
        if wire is not None:
            self.network.carry(wire, DOWN, frames)
