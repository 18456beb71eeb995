"""One life of a worker: a real session over simulated sockets, and the program that trains with it.

What blocks a worker's thread elsewhere is a flow here: it goes on when messages arrive and when time passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psengine.errors import ProtocolError, PSEngineError, ServerError
from psengine.parameter_server.client import join
from psengine.parameter_server.client.connection import _OF_SEGMENTS, Connection
from psengine.parameter_server.client.flow import Flow, SteppedFlow
from psengine.parameter_server.client.membership import Membership
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.runtime import Receiver, Runtime
from psengine.parameter_server.client.worker_session import WorkerSession
from psengine.protocol.frames import decode, encode
from psengine.protocol.messages import Message, MessageType
from simulation.clock import Clock
from simulation.network import Network, Socket
from simulation.segments import SimulatedSegments

GOODBYE_S = 1.0


class WorkerProcess:
    """See the module's text; the ``Transport`` of its session.

    Args:
        number: of this process among all, from 0.
        rank: the worker's, which processes before and after this one have too.
        program: makes the flow that trains.
        finds: turns an address into (server, shard).
        segments: the memory that it shares with servers.

    Attributes:
        is_dead: killed, or ended.
        is_stopped: stopped as by SIGSTOP.
        error: why the program failed; None where it has not.
        has_finished: the program has come to its end.
        has_state: the program has state of the job.
    """

    is_own_thread = False
    _look_into = Connection._look_into

    def __init__(
        self,
        clock: Clock,
        network: Network,
        number: int,
        rank: int,
        options: SessionOptions,
        nonce: int,
        tick_s: float,
        finds: Callable[[str], tuple[int, int]],
        program: Callable[[WorkerProcess], Flow[None]],
        segments: SimulatedSegments | None = None,
    ) -> None:
        self.clock, self.number, self.rank = clock, number, rank
        self.is_dead = self.is_stopped = self.has_finished = self.has_state = False
        self.error: PSEngineError | None = None
        self._network, self._tick_s, self._finds = network, tick_s, finds
        self._sockets: list[Socket] = []
        self._addresses: list[str] = []
        self.segments = segments
        self._waiting: list[tuple[int, list[bytes]]] = []
        runtime = Runtime(
            now_s=lambda: clock.now_s,
            draw_nonce=lambda: nonce,
            connect=self._connect,
            watch=lambda *_: None,
            is_listening=lambda _: True,
            host=lambda: "node",
            process_id=lambda: 1,
        )
        self.session = WorkerSession(options, runtime)
        self.session._finalizer.detach()  # nobody says goodbye for a process that was killed
        self._program = SteppedFlow(self._life(program))
        clock.note("worker starts", rank, number)
        clock.after(0.0, self._tick)

    @property
    def membership(self) -> Membership:
        """The client's core."""
        return self.session._membership

    @property
    def needs_state(self) -> bool:
        """Whether it waits for another worker's state, or lost its place and has to get it again."""
        return not self.has_state or self.membership.fenced is not None

    def _life(self, program: Callable[[WorkerProcess], Flow[None]]) -> Flow[None]:
        yield from program(self)
        yield from join.leave(self.membership)
        self.membership.closing.set()
        yield from self._goodbye()

    def _goodbye(self) -> Flow[None]:
        membership = self.membership
        goodbyes = [
            membership.ask(link, Message(MessageType.BYE), timeout_s=GOODBYE_S, handles_refusal=True)
            for link in membership.links
            if link.last_heard_s is not None and not link.is_paused and membership.fatal is None
        ]
        try:
            yield goodbyes
        except PSEngineError:
            return

    # ---- life --------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """The process ends at once."""
        self.clock.note("worker dies", self.rank, self.number)
        self.is_dead = True
        self._waiting.clear()
        self._leave_segments()

    def stop(self) -> None:
        """Stop, as by SIGSTOP."""
        self.is_stopped = True

    def resume(self) -> None:
        """Go on: time has leapt."""
        if self.is_dead or not self.is_stopped:
            return
        self.is_stopped = False
        waiting, self._waiting = self._waiting, []
        for index, frames in waiting:
            self.receive(index, frames)

    def _leave_segments(self) -> None:
        if self.segments is not None:
            self.segments.died()

    def _tick(self) -> None:
        if self.is_dead:
            return
        if not self.is_stopped:
            now_s, membership = self.clock.now_s, self.membership
            for socket in self._sockets:
                if socket.is_new:
                    socket.is_new = False
                    membership.connected(socket.index, now_s)
            membership.tick(now_s)
            self.step()
        self.clock.after(self._tick_s, self._tick)

    def step(self) -> None:
        """Let the program go on as far as it can."""
        program = self._program
        program.step(self.clock.now_s)
        if not program.is_over or self.is_dead:
            return
        self.is_dead = True
        if self.segments is not None:
            self.segments.close()
        self._leave_segments()
        if program.error is None:
            self.has_finished = True
        elif isinstance(program.error, PSEngineError):
            self.error = program.error
        else:
            raise program.error
        self.clock.note("worker ends", self.rank, self.number, type(self.error).__name__)

    # ---- its transport -----------------------------------------------------------------------------------------

    def _connect(self, receiver: Receiver, options: SessionOptions) -> WorkerProcess:
        receiver.tick(self.clock.now_s)  # a thread may do so before this returns
        return self

    def do(self, function: Callable[..., None], *arguments: Any) -> None:
        function(*arguments)

    def open(self, address: str, *, carries_payloads: bool = True) -> None:
        server, shard = self._finds(address)
        self._addresses.append(address)
        self._sockets.append(self._network.open(self, len(self._sockets), server, shard))

    def send(self, index: int, message: Message) -> bool:
        if self.segments is not None and message.type is MessageType.PUSH:
            self.segments.place(self._addresses[index], message)
        return self._sockets[index].send([bytes(frame) for frame in encode(message)])

    def close(self) -> None:
        self.membership.crashed(ServerError("the simulation is over"))

    def receive(self, index: int, frames: list[bytes]) -> None:
        """A message came from a shard."""
        if self.is_dead:
            return
        if self.is_stopped:
            self._waiting.append((index, frames))
            return
        membership = self.membership
        try:
            message = decode(frames)
        except ProtocolError as error:
            membership.garbled(index, error, self.clock.now_s)
        else:
            self.clock.note_message("to worker", (self.rank, self.number), frames[0], message)
            is_of_segments = message.in_segment or message.type in _OF_SEGMENTS
            if self.segments is None or not is_of_segments or self._look_into(index, message):  # type: ignore[misc]
                membership.received(index, message, self.clock.now_s)
        self.step()
