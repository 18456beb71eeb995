"""Clients and a shard in one thread, under one simulated clock: no socket, no thread, no randomness.

A client's I/O runs when messages arrive and the clock ticks. What blocks a worker's thread elsewhere is a flow here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from psengine.errors import ServerError
from psengine.parameter_server.client.flow import Flow, SteppedFlow
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.runtime import Receiver, Runtime
from psengine.parameter_server.client.worker_session import WorkerSession
from psengine.protocol.frames import decode, encode
from psengine.protocol.messages import Message
from support.shard_world import World

TICK_S = 0.1
T = TypeVar("T")


class SimulatedTransport:
    """A client's sockets: what it sends waits in ``up`` until the simulation takes it."""

    is_own_thread = False
    segments = None

    def __init__(self, name: str, receiver: Receiver) -> None:
        self.receiver = receiver
        self.routes: list[bytes] = []
        self.up: deque[tuple[bytes, list[bytes]]] = deque()
        self.is_cut = False
        self._name = name

    def do(self, function: Callable[..., None], *arguments: Any) -> None:
        function(*arguments)

    def open(self, address: str, *, carries_payloads: bool = True) -> None:
        self.routes.append(f"{self._name}.{len(self.routes)}".encode())

    def send(self, index: int, message: Message) -> bool:
        if not self.is_cut:
            self.up.append((self.routes[index], [bytes(frame) for frame in encode(message)]))
        return not self.is_cut

    def close(self) -> None:
        self.receiver.crashed(ServerError("the simulation is over"))


class Simulation:
    """A shard, its clients, and what they said: (seconds, route, type) of each message, in order."""

    def __init__(self, **options: Any) -> None:
        self.world = World(**options)
        self.transports: list[SimulatedTransport] = []
        # A session that is forgotten says goodbye, and waits for the answer: they live as long as the simulation.
        self._sessions: list[WorkerSession] = []
        self.said: list[tuple[float, bytes, str]] = []

    def client(self, rank: int, **options: Any) -> WorkerSession:
        """One more client, that has not said HELLO yet."""

        def connect(receiver: Receiver, _: SessionOptions) -> SimulatedTransport:
            receiver.tick(self.world.now_s)  # a thread may do so before this returns
            self.transports.append(SimulatedTransport(f"worker{rank}", receiver))
            return self.transports[-1]

        number = len(self.transports)
        runtime = Runtime(
            now_s=lambda: self.world.now_s,
            draw_nonce=lambda: 1000 + number,
            connect=connect,
            watch=lambda *_: None,
            is_listening=lambda _: True,
        )
        session = WorkerSession(SessionOptions(addresses=["ipc:///nowhere"], rank=rank, **options), runtime)
        self._sessions.append(session)
        return session

    def close(self) -> None:
        """The clients' sockets are gone."""
        for transport in self.transports:
            transport.close()

    def run(self, flow: Flow[T], *others: Flow[Any], limit_s: float = 60.0) -> T:
        """Let time pass until these have ended; what the first one returned."""
        stepped = [SteppedFlow(one) for one in (flow, *others)]

        def are_over() -> bool:
            for one in stepped:
                one.step(self.world.now_s)
                if one.error is not None:
                    raise one.error
            return all(one.is_over for one in stepped)

        self.until(are_over, limit_s)
        return stepped[0].result

    def until(self, is_reached: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Let time pass until something is so."""
        deadline_s = self.world.now_s + limit_s
        self._deliver()
        while not is_reached():
            assert self.world.now_s < deadline_s, f"not within {limit_s} simulated seconds"
            self.tick()

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        for _ in range(round(seconds / TICK_S)):
            self.tick()

    def tick(self) -> None:
        """100 ms pass, and every message arrives."""
        self.world.now_s += TICK_S
        self.world.advance(0.0)
        self.world._post(self.world.shard.tick(self.world.now_s), True)
        for transport in self.transports:
            transport.receiver.tick(self.world.now_s)
        self._deliver()

    def _deliver(self) -> None:
        while any(transport.up for transport in self.transports) or self._has_answers():
            for transport in self.transports:
                while transport.up:
                    route, frames = transport.up.popleft()
                    message = decode(frames)
                    self.said.append((round(self.world.now_s, 3), route, message.type.name))
                    self.world.deliver(route, message)
                for index, route in enumerate(transport.routes):
                    answers, self.world.sent[route] = self.world.sent.get(route, []), []
                    for answer in answers:
                        if not transport.is_cut:
                            self.said.append((round(self.world.now_s, 3), route, answer.type.name))
                            transport.receiver.received(index, answer, self.world.now_s)

    def _has_answers(self) -> bool:
        return any(self.world.sent.get(route) for transport in self.transports for route in transport.routes)
