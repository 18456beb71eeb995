"""A client's membership of a job: who it is, to which shards, and how they are asked.

    any thread      ask(link, message) ── do ──►  I/O thread: link.begin
                    pause() ... resume()          everything but the handshake is held meanwhile

What the servers say arrives at ``core.ClientCore``.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from psengine.errors import FencedError, PSEngineError
from psengine.parameter_server.client.chunk_map import ChunkMap
from psengine.parameter_server.client.link import Identity, Link
from psengine.parameter_server.client.operation import Operation, Parking, Request
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.runtime import Receiver, Runtime, Transport
from psengine.protocol.layout import ChunkSpec, job_number
from psengine.protocol.messages import CONTROL, NOBODY, Message, MessageType

# Request ids lie above any exchange number, so that an ERROR's sequence tells which of the two it is about.
FIRST_REQUEST = 1 << 40


@dataclass(frozen=True, slots=True)
class StateRequest:
    """A joiner wants the state of this worker."""

    rank: int
    incarnation: int


class OwnMembership:
    """See the module's text.

    Args:
        options: of the session.
        runtime: the clock, randomness and sockets.
        lost_membership: see ``Link``.

    Attributes:
        identity: job, rank and incarnation.
        nonce: tells the servers this client from others that claim its rank.
        links: one per shard, the lead first.
        server_sizes: number of shards of each server, in the order of addresses; empty before the first handshake.
        chunks: where the job's chunks are.
        members: live workers, as the lead last said.
        has_roll: the lead has listed the live workers since this worker's first average, which waits for all workers.
        contributors: how many workers' gradients are in the last average.
        configured: chunk's key -> CONFIGURE's body, sent again to a server whose snapshot is older.
        takes_part: whether this worker has the job's values, or gave them; set by the session. Before, a restarted
            server must not take it for one that has.
        is_welcome: the servers have let this client in at least once.
        is_held: messages other than the handshake's wait until the handshake has ended.
        next_heartbeat_s: when the next heartbeat is due.
        fenced: why exchanges cannot go on before a rejoin; None while they can.
        fatal: why nothing can go on; None while it can.
        closing: set when the session ends.
    """

    connection: Transport

    def __init__(self, options: SessionOptions, runtime: Runtime, lost_membership: Callable[[str], None]) -> None:
        self.options = options
        self.runtime = runtime
        self.identity = Identity(job_number(options.job))
        self.nonce = runtime.draw_nonce()
        self.links: list[Link] = []
        self.server_sizes: list[int] = []
        # Per link its sockets, that of payloads first; and per socket its link.
        self._sockets: list[list[int]] = []
        self._link_of: dict[int, Link] = {}
        self.chunks = ChunkMap()
        self.members: tuple[int, ...] = ()
        self.has_roll = False
        self.contributors = 0
        self.takes_part = False
        self.configured: dict[int, dict[str, Any]] = {}
        self.is_welcome = False
        self.is_held = True
        self.next_heartbeat_s = 0.0
        self.fenced: FencedError | None = None
        self.fatal: PSEngineError | None = None
        self.parking = Parking(runtime.now_s)
        self.closing = threading.Event()
        self._lost_membership = lost_membership
        self._ids = itertools.count(FIRST_REQUEST)

    def connect(self, receiver: Receiver) -> None:
        """Start the transport; from here on it calls ``receiver``, which has to be complete."""
        self.connection = self.runtime.connect(receiver, self.options)

    def __str__(self) -> str:
        """Who this is, for the log."""
        rank = self.identity.worker
        return f"{'a reader' if rank == NOBODY else f'worker {rank}'} of job {self.options.job!r}"

    # ---- shards ------------------------------------------------------------------------------------------------

    def open(self, address: str) -> Link:
        """Connect to one more shard."""
        # A worker's HELLO and heartbeats have a connection of their own. A reader has no lease to lose.
        sockets = [len(self._link_of) + n for n in range(1 if self.options.role == "reader" else 2)]

        def transmit(message: Message) -> bool:
            return self.connection.send(sockets[-1] if message.type in CONTROL else sockets[0], message)

        link = Link(len(self.links), address, self.identity, transmit, self._lost_membership)
        self.links.append(link)
        self._sockets.append(sockets)
        for number in sockets:
            self._link_of[number] = link
            self.connection.do(partial(self.connection.open, address, carries_payloads=number == sockets[0]))
        self.runtime.watch(link, self.closing)
        return link

    def link_of(self, socket: int) -> Link:
        """The shard that this socket leads to."""
        return self._link_of[socket]

    def carries_payloads(self, socket: int) -> bool:
        """Whether exchanges travel through this socket; else HELLO and heartbeats do."""
        return socket == self._sockets[self._link_of[socket].index][0]

    def first_links(self) -> list[Link]:
        """Each server's first shard."""
        return [self.links[sum(self.server_sizes[:server])] for server in range(len(self.server_sizes))]

    # ---- asking; any thread ------------------------------------------------------------------------------------

    def submit(self, link: Link, operation: Operation) -> None:
        """Hand an operation to the I/O thread.

        Raises:
            PSEngineError: the session has failed or is closed.
        """
        if self.fatal is not None:
            raise self.fatal.with_traceback(None)
        self.connection.do(self._begin, link, operation)

    def _begin(self, link: Link, operation: Operation) -> None:
        if self.fatal is not None:
            operation.fail(self.fatal)
        elif self.fenced is not None and operation.is_of_a_live_worker:
            operation.fail(self.fenced)
        else:
            link.begin(operation, self.runtime.now_s())

    def ask(
        self,
        link: Link,
        message: Message,
        *,
        what: str | None = None,
        timeout_s: float | None = None,
        destinations: Sequence[torch.Tensor] = (),
        dtype: torch.dtype | None = None,
        is_urgent: bool = False,
        handles_refusal: bool = False,
    ) -> Request:
        """Begin a request; its id is set here. See ``Request`` for the last two."""
        message.sequence = next(self._ids)
        name = what or message.type.name
        request = Request(
            message,
            lambda: name,
            self.parking,
            self.options.timeout_s if timeout_s is None else timeout_s,
            destinations,
            dtype,
            is_urgent=is_urgent,
            # A reader is no member, so it cannot lose its membership.
            handles_refusal=handles_refusal or self.options.role == "reader",
        )
        self.submit(link, request)
        return request

    def register(self, link: Link, spec: ChunkSpec, values: torch.Tensor, *, is_urgent: bool = False) -> Request:
        """Begin to REGISTER a chunk."""
        described = spec.to_body()
        body = {"kind": described["kind"], "segments": described["segments"]}
        message = Message(MessageType.REGISTER, key=spec.key, body=body, payload=values)
        return self.ask(link, message, what=f"REGISTER of {spec.describe()}", is_urgent=is_urgent)

    def seal(self, link: Link, *, is_urgent: bool = False) -> Request:
        """Begin to SEAL a shard."""
        body = {"chunks": len(self.chunks.at(link.index)), "fingerprint": self.chunks.fingerprint}
        return self.ask(link, Message(MessageType.SEAL, body=body), is_urgent=is_urgent)

    # ---- holding; any thread -----------------------------------------------------------------------------------

    def pause(self) -> None:
        """Hold everything but the handshake, until ``resume``."""
        self.connection.do(self.hold)

    def hold(self) -> None:
        """``pause``, on the I/O thread."""
        self.is_held = True
        for link in self.links:
            link.pause()

    def resume(self, fenced: FencedError | None = None) -> None:
        """What was held goes on; with ``fenced`` exchanges end, until a rejoin."""
        self.connection.do(self._resume, fenced)

    def _resume(self, fenced: FencedError | None) -> None:
        now_s = self.runtime.now_s()
        self.fenced = fenced
        self.takes_part = self.takes_part and fenced is None
        self.is_welcome = True
        self.is_held = False
        self.next_heartbeat_s = 0.0
        for link in self.links:
            if fenced is not None:
                link.fence(fenced, now_s)
            link.resume(now_s)
