"""One life of a worker: a real session over simulated sockets, and the program that trains with it.

What blocks a worker's thread elsewhere is a flow here: it goes on when messages arrive and when time passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from psengine.errors import ProtocolError, PSEngineError, ServerError
from psengine.parameter_server.client import join
from psengine.parameter_server.client.channel import Channel
from psengine.parameter_server.client.flow import Flow
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.runtime import Runtime
from psengine.parameter_server.client.worker_session import WorkerSession
from psengine.protocol.frames import decode, encode, split
from psengine.protocol.layout import ChunkSpec
from psengine.protocol.messages import Message, MessageType
from simulation import inspection
from simulation.network import UP, Socket, copied, place_of
from simulation.segments import SimulatedSegments
from simulation.stepped_flow import SteppedFlow
from simulation.violation import require


class WorkerProcess:
    """See the module's text; the ``Transport`` of its session.

    Args:
        number: of this process among all, from 0.
        rank: the worker's, which processes before and after this one have too.
        shares: whether it shares memory with servers.

    Attributes:
        is_dead: killed, or ended.
        is_stopped: stopped as by SIGSTOP.
        error: why the program failed; None where it has not.
        has_finished: the program has come to its end.
        has_state: the program has state of the job.
        waits_since_s: since when it has waited for what it waits for.
    """

    is_own_thread = False

    def __init__(self, world, number: int, rank: int, options: SessionOptions, nonce: int, *, shares: bool) -> None:
        self.world, self.clock, self.number, self.rank = world, world.clock, number, rank
        self.is_dead = self.is_stopped = self.has_finished = self.has_state = False
        self.error: PSEngineError | None = None
        self.waits_since_s = self.clock.now_s
        self._sockets: dict[Channel, Socket] = {}
        self._waiting: list[Callable[[], None]] = []
        self._terms: dict[int, int] = {}  # by server, the highest that it has heard
        self._outdated: list[Message] = []  # of a lower one
        # By chunk, the answer that it reads in the server's memory, and a copy.
        self._lent: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.segments = SimulatedSegments() if shares else None
        clock = self.clock
        self.options = replace(options, nonce=nonce)
        self.runtime = Runtime(
            now_s=lambda: clock.now_s,
            connect=lambda _: self,
            host=lambda: "node",
            process_id=lambda: number,
            process_table=lambda: "the servers' host" if rank < world.scenario.shares else "",
        )
        self._begin()
        clock.note("worker starts", rank, number)
        clock.after(0.0, self._tick)

    def _begin(self) -> None:
        """Make what runs in it."""
        self.session = WorkerSession(self.options, self.runtime)
        inspection.forget_at_exit(self.session)  # nobody says goodbye for a process that was killed
        self._program: Any = SteppedFlow(self._life())

    @property
    def receiver(self) -> Any:
        """The client's core."""
        return self.session.job_connection

    @property
    def needs_state(self) -> bool:
        """Whether it waits for another worker's state, or lost its place and has to get it again."""
        return not self.has_state or self.receiver.fenced is not None

    @property
    def incarnation(self) -> int:
        """As the coordinator gave it."""
        return self.receiver.identity.incarnation  # type: ignore[no-any-return]

    @property
    def patience_s(self) -> float:
        """How much longer it may have to wait than others."""
        return 0.0

    def release(self) -> None:
        """The simulation is over."""

    @property
    def takes_part(self) -> bool:
        """Whether it trains, with state that counts."""
        is_out = self.world.views.was_out(self, 0.0)
        return not (self.is_dead or self.is_stopped or self.needs_state or is_out)

    def describe(self) -> str:
        """For people."""
        waits = inspection.open_operations(self.session)
        return f"worker {self.rank} ({self.number}) since {self.waits_since_s:.2f} s for {waits}"

    def _life(self) -> Flow[None]:
        try:
            yield from self.world.job.program(self)
        except PSEngineError:
            yield from join.leave(self.receiver, failed=True)
            raise
        yield from join.leave(self.receiver)

    # ---- what programs do ----------------------------------------------------------------------------------------

    def enter(self, layout: Sequence[ChunkSpec], initial: Callable[[ChunkSpec], torch.Tensor]) -> Flow[str]:
        """As ``WorkerSession.start`` and ``enter``."""
        yield from join.start(self.receiver)
        return (yield from join.take_part(self.receiver, layout, initial))

    def packed(self, key: int, values: torch.Tensor) -> torch.Tensor:
        """A gradient in the memory that it is sent from."""
        return values if self.segments is None else self.segments.packed(key, values)

    def check_term(self, answer: Message) -> None:
        """An answer was believed."""
        is_current = all(one is not answer for one in self._outdated)
        require(is_current, "worker {} believes who leads no more, in term {}", self.rank, answer.term)

    def land(self, push: Any, landing: torch.Tensor) -> None:
        """Copy an answer that is in the server's memory; it must stay as it is until ``check_lent``."""
        self.check_term(push.answer)
        if (values := push.take()) is not None:
            landing.copy_(values)
            self._lent[push.key] = values, landing.clone()

    def check_lent(self, key: int) -> None:
        """The chunk's next push comes."""
        lent, copy = self._lent.pop(key, (torch.empty(0), torch.empty(0)))
        require(torch.equal(lent, copy), "the answer of chunk {} changed while worker {} read it", key, self.rank)

    # ---- life --------------------------------------------------------------------------------------------------

    def kill(self, server_s: float = 0.0) -> None:
        """The process ends at once; servers learn after a while that its connections have."""
        self.clock.note("worker dies", self.rank, self.number)
        self.is_dead = True
        self._end(server_s)

    def _end(self, server_s: float) -> None:
        self._waiting.clear()
        for socket in self._sockets.values():
            if socket.connection is not None:
                self.world.network.drop(socket.connection, worker_s=0.0, server_s=server_s)
        if self.segments is not None:
            self.segments.died()

    def stop(self) -> None:
        """Stop, as by SIGSTOP."""
        self.is_stopped = True

    def resume(self) -> None:
        """Go on: time has leapt."""
        if self.is_dead or not self.is_stopped:
            return
        self.is_stopped, self.waits_since_s = False, self.clock.now_s
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            self._call(call)

    def _call(self, function: Callable[[], None]) -> None:
        """Something happens to the process: now, or once it goes on."""
        if self.is_dead:
            return
        if self.is_stopped:
            self._waiting.append(function)
            return
        function()
        self._step()

    def _tick(self) -> None:
        if not self.is_dead:
            if not self.is_stopped:
                self._call(self._look)
            self.clock.after(self.world.scenario.tick_s, self._tick)

    def _look(self) -> None:
        self.receiver.tick(self.clock.now_s)

    def _step(self) -> None:
        """Let the program go on as far as it can."""
        program = self._program
        program.step(self.clock.now_s)
        self.waits_since_s = max(self.waits_since_s, inspection.waits_since_s(program))
        if not program.is_over or self.is_dead:
            return
        self.is_dead = True
        if program.error is None:
            self.has_finished = True
        elif isinstance(program.error, PSEngineError):
            self.error = program.error
        else:
            raise program.error
        self.clock.note("worker ends", self.rank, self.number, type(self.error).__name__)
        self.world.liveness.unrest_s = self.clock.now_s
        for socket in self._sockets.values():
            self.world.network.close(socket)
        if self.segments is not None:
            self.segments.withdraw()
            self.segments.died()

    # ---- its transport -----------------------------------------------------------------------------------------

    def do(self, function: Callable[..., None], *arguments: Any) -> None:
        function(*arguments)

    def open(self, channel: Channel) -> None:
        network, former = self.world.network, self._sockets.get(channel)
        if former is not None:
            network.close(former)
        self._sockets[channel] = socket = Socket(self, channel, *place_of(channel.address))
        network.connect(socket)

    def opened(self, socket: Socket) -> None:
        self._call(lambda: socket.channel.connected(self.clock.now_s))

    def lost(self, socket: Socket) -> None:
        socket.connection = None

        def tell() -> None:
            if self._sockets.get(socket.channel) is socket:
                socket.channel.disconnected(self.clock.now_s)

        self._call(tell)

    def send(self, channel: Channel, message: Message) -> None:
        socket = self._sockets.get(channel)
        if socket is None or socket.connection is None:
            return
        if self.segments is not None and message.type is MessageType.PUSH:
            self.segments.place(channel.address, message)
        elif self.segments is not None and message.type is MessageType.RESUME and "open" in message.body:
            self.segments.offer(channel.address, "ipc://simulated", message)
        self.world.network.carry(socket.connection, UP, copied(encode(message)))

    def close(self) -> None:
        self.receiver.crashed(ServerError("the simulation is over"))

    def receive(self, socket: Socket, frames: list[bytes]) -> None:
        """A message came from a server."""
        for part in split(frames):
            self._call(lambda part=part: self._take(socket, part))  # type: ignore[misc]

    def _take(self, socket: Socket, frames: list[bytes]) -> None:
        if self._sockets.get(socket.channel) is not socket:
            return
        try:
            message = decode(frames)
        except ProtocolError as error:
            socket.channel.garbled(error)
            return
        self.clock.note_message("to worker", (self.rank, self.number), frames)
        self.world.faults.noticed(message.type.name)
        server = socket.server % self.world.scenario.servers
        if message.term < self._terms.get(server, 0) or not socket.channel.is_connected:
            self._outdated.append(message)
        else:
            self._terms[server] = message.term
            if message.type is MessageType.WELCOME:
                self.world.views.welcomed(self, message)
            elif socket.channel is not self.receiver.control:
                self.world.job.heard(self, socket.channel.index, message)
        if self.segments is None or self._look_into(socket, message):
            socket.channel.received(message, self.clock.now_s)

    def _look_into(self, socket: Socket, message: Message) -> bool:
        """Take what a message says of shared memory, as ``Connection`` does; whether the session gets it."""
        address = socket.channel.address
        assert self.segments is not None
        if message.type is MessageType.RESUMED:
            self.segments.resumed(address, "ipc://", message)
        if message.place is None or self.segments.fetch(address, message):
            return True
        self.world.network.close(socket)
        socket.channel.disconnected(self.clock.now_s)
        return False
