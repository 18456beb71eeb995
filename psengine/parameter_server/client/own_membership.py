"""A client's standing with its servers: heartbeats, and coming back after a lost lease or a restarted server.

    I/O thread      ... fenced | not_member | new epoch: pause ──────────────────── resume: ask again for what is open
    recovery thread                               └ HELLO lead ─ HELLO others ─ (register again) ┘

A recovery thread lives as long as one recovery. What is under way is held meanwhile, and nothing is asked twice: pushes
are probed first.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from psengine.errors import AuthenticationError, FencedError, ProtocolError, PSEngineError
from psengine.parameter_server.client import progress
from psengine.parameter_server.client.chunk_map import ChunkMap
from psengine.parameter_server.client.connection import Connection
from psengine.parameter_server.client.handshake import Handshake, Welcome
from psengine.parameter_server.client.link import Identity, Link
from psengine.parameter_server.client.operation import Operation, Parking, Push, Request, wait_all
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.reachability import watch_first_contact
from psengine.parameter_server.client.stalls import StallWatch
from psengine.parameter_server.client.telemetry import Telemetry
from psengine.protocol.layout import ChunkSpec, job_number
from psengine.protocol.messages import CONTROL, NOBODY, ErrorCode, Message, MessageType
from psengine.tracing.stall_inspector import stall_after_s

logger = logging.getLogger(__name__)

# Recoveries that follow each other faster than this are slowed down.
CALM_S = 5.0
# Request ids lie above any exchange number, so that an ERROR's sequence tells which of the two it is about.
FIRST_REQUEST = 1 << 40


@dataclass(frozen=True, slots=True)
class StateRequest:
    """A joiner wants the state of this worker."""

    rank: int
    incarnation: int


class OwnMembership:
    """See the module's text.

    Attributes:
        identity: job, rank and incarnation.
        links: one per shard, the lead first.
        chunks: where the job's chunks are.
        members: live workers, as the lead last said.
        has_roll: it said so after this worker had an average; the first one waits for everybody.
        contributors: whose gradients the last average was made of.
        configured: key -> CONFIGURE's body; a server restored from a snapshot may be older than it.
        takes_part: whether this worker has the job's values, or gave them; set by the session. Before, a restarted
            server must not take it for one that has.
        lease_s, heartbeat_s: as the lead said.
        is_welcome: the servers let us in once.
        fenced: why exchanges cannot go on before a rejoin; None while they can.
        fatal: why nothing can go on; None while it can.
        kept: keys whose averages stay where they arrived until the next is there.
        closing: set when the session ends.
        telemetry: what heartbeats say of this worker.
    """

    def __init__(self, options: SessionOptions) -> None:
        self.options = options
        self.identity = Identity(job_number(options.job))
        self.links: list[Link] = []
        # Per link its sockets, that of payloads first; and per socket its link.
        self._sockets: list[list[int]] = []
        self._link_of: dict[int, Link] = {}
        self.chunks = ChunkMap()
        self.members: tuple[int, ...] = ()
        self.has_roll = False
        self.contributors = 0
        self.takes_part = False
        self.configured: dict[int, dict[str, Any]] = {}
        self.lease_s = 5.0
        self.heartbeat_s = 1.0
        self.is_welcome = False
        self.fenced: FencedError | None = None
        self.fatal: PSEngineError | None = None
        self.kept: set[int] = set()
        self.parking = Parking()
        self.closing = threading.Event()
        self.telemetry = Telemetry()
        self._stalls = StallWatch(stall_after_s())
        self.handshake = Handshake(self)
        self._ids = itertools.count(FIRST_REQUEST)
        self._next_heartbeat_s = 0.0
        self._state_requests: dict[int, StateRequest] = {}
        self._handled_requests: set[StateRequest] = set()
        self._is_recovering = False
        self._recovered_s = -CALM_S
        self._hasty_recoveries = 0
        self.connection = Connection(
            self, keys=options.keys, checksum=options.checksum, uses_local_socket=options.uses_local_socket
        )

    # ---- any thread --------------------------------------------------------------------------------------------

    def open(self, address: str) -> Link:
        """Connect to one more shard."""
        # A worker's HELLO and heartbeats have a connection of their own. A reader has no lease to lose.
        sockets = [len(self._link_of) + n for n in range(1 if self.options.role == "reader" else 2)]

        def transmit(message: Message) -> bool:
            return self.connection.send(sockets[-1] if message.type in CONTROL else sockets[0], message)

        link = Link(len(self.links), address, self.identity, transmit, self.lost_membership)
        self.links.append(link)
        self._sockets.append(sockets)
        for number in sockets:
            self._link_of[number] = link
            self.connection.do(partial(self.connection.open, address, carries_payloads=number == sockets[0]))
        watch_first_contact(link, self.closing)
        return link

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
        elif self.fenced is not None and isinstance(operation, Push):
            operation.fail(self.fenced)
        else:
            link.begin(operation, time.monotonic())

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

    def greet(self) -> Welcome:
        """HELLO to all; everything else is held until ``resume``. Raises like ``Handshake.greet``."""
        welcome = self.handshake.greet()
        self.members = welcome.members
        return welcome

    def pause(self) -> None:
        """Hold everything but handshakes, until ``resume``."""
        self.connection.do(self._pause)

    def _pause(self) -> None:
        self._is_recovering = True
        for link in self.links:
            link.pause()

    def resume(self, fenced: FencedError | None = None) -> None:
        """What was held goes on; with ``fenced`` exchanges end, until a rejoin."""
        self.connection.do(self._resume, fenced)

    def _resume(self, fenced: FencedError | None) -> None:
        now_s = time.monotonic()
        self.fenced = fenced
        self.takes_part = self.takes_part and fenced is None
        self.is_welcome = True
        self._is_recovering = False
        self._next_heartbeat_s = 0.0
        for link in self.links:
            if fenced is not None:
                link.fail_pushes(fenced, now_s)
            link.resume(now_s)

    # ---- recovery ----------------------------------------------------------------------------------------------

    def lost_membership(self, reason: str) -> None:
        """I/O thread: a shard does not know this incarnation of us any more."""
        if self._is_recovering or not self.is_welcome or self.fatal is not None or self.closing.is_set():
            return
        self._pause()
        logger.warning("saying HELLO again to the servers of job %r: %s", self.options.job, reason)
        thread = threading.Thread(target=self._recover, args=(reason,), name="psengine-client-recovery", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._give_up(PSEngineError(f"nobody can say HELLO again, as no thread starts ({error}): {reason}"))

    def _recover(self, reason: str) -> None:
        try:
            self._slow_down()
            welcome = self.greet()
            if welcome.lost and self.options.role == "worker":
                self.handshake.restore(welcome.lost)
            self._configure_again()
            if self.options.role == "worker":
                progress.tell(self)
            fenced = None
            if "join" in welcome.states:
                fenced = FencedError(
                    f"worker {self.identity.worker} of job {self.options.job!r} was away for longer than its lease, and"
                    f" the others went on without it ({reason}). It has to take over their state first (rejoin). Where"
                    " that happens often, raise the servers' --lease-s.",
                    ErrorCode.FENCED,
                )
            self._recovered_s = time.monotonic()
            self.resume(fenced)
        except PSEngineError as error:
            self._give_up(error)
        except Exception as error:
            logger.exception("the client's recovery failed")
            self._give_up(PSEngineError(f"the client's recovery failed: {type(error).__name__}: {error}"))

    def _configure_again(self) -> None:
        """The snapshot that a server came back with may be older than its optimizers."""
        wait_all(
            [
                self.ask(
                    self.links[self.chunks.shard_of[key]],
                    Message(MessageType.CONFIGURE, key=key, body=body),
                    what=f"CONFIGURE of chunk {key}",
                    is_urgent=True,
                )
                for key, body in self.configured.items()
            ]
        )

    def _give_up(self, error: PSEngineError) -> None:
        if not self.closing.is_set():
            logger.error("cannot go on with job %r: %s", self.options.job, error)
        try:
            self.connection.do(self.fail, error)
        except PSEngineError:
            return  # the I/O thread has ended, and with it everything that waits

    def _slow_down(self) -> None:
        if time.monotonic() - self._recovered_s < CALM_S:
            self._hasty_recoveries += 1
            self.closing.wait(min(2.0, 0.05 * 2.0**self._hasty_recoveries))
        else:
            self._hasty_recoveries = 0

    def fail(self, error: PSEngineError) -> None:
        """I/O thread: nothing can go on."""
        if self.fatal is None:
            self.fatal = error
        now_s = time.monotonic()
        for link in self.links:
            link.fail_all(self.fatal, now_s)

    # ---- what the I/O thread calls: see connection.Receiver ----------------------------------------------------

    def received(self, index: int, message: Message, now_s: float) -> None:
        """A message came."""
        link = self._link_of[index]
        link.last_heard_s = now_s
        kind = message.type
        if kind is MessageType.WELCOME:
            link.epoch, link.server_version = message.epoch, message.peer_version
            link.ledger.epoch = link.ledger.epoch or link.epoch
            link.credit_bytes = message.body["credit_bytes"]
            if link.index == 0:
                self.lease_s, self.heartbeat_s = message.body["lease_s"], message.body["heartbeat_s"]
        elif message.epoch != link.epoch and message.epoch and link.epoch:
            self.lost_membership(f"{link.address} was restarted")
            if kind is not MessageType.ERROR:
                return  # of a life that has ended: what it acknowledged then is not what the server has now
        if kind is MessageType.UPDATED:
            self.contributors = message.body.get("contributors", 0)
        if kind is MessageType.UPDATED and self.contributors > len(self.members):
            self._next_heartbeat_s = 0.0  # somebody came: a restarted server would ask who takes part
        if kind is MessageType.HEARTBEAT_ACK:
            if link.index == 0:
                self.members = tuple(message.body["members"])
                self.has_roll = self.has_roll or message.sequence > 0
        elif kind is MessageType.STATE_WANTED:
            request = StateRequest(message.body["rank"], message.body["incarnation"])
            if request not in self._handled_requests:
                self._state_requests[request.rank] = request
        elif kind is MessageType.RESULT_WANTED:
            self._send_result(link, message, now_s)
        elif kind is MessageType.PROGRESS_WANTED:
            link.tell_progress()
        else:
            link.receive(message, now_s)

    def garbled(self, index: int, error: ProtocolError, now_s: float) -> None:
        """Something came that is no message."""
        link = self._link_of[index]
        logger.warning("%s sent what is no message: %s", link.address, error)
        link.receive_garbled(error, now_s)

    def connected(self, index: int, now_s: float) -> None:
        """A socket has a new connection."""
        link = self._link_of[index]
        if index == self._sockets[link.index][0]:
            link.connected(now_s)

    def rejected(self, index: int, error: AuthenticationError, now_s: float) -> None:
        """A server does not let this client in."""
        self.fail(error)

    def tick(self, now_s: float) -> None:
        """100 ms have passed."""
        beats = self.is_welcome and now_s >= self._next_heartbeat_s and self.options.role == "worker"
        if beats:
            self._next_heartbeat_s = now_s + self.heartbeat_s
            telemetry = self.telemetry.to_body()
        for link in tuple(self.links):
            link.tick(now_s)
            if beats and not link.is_paused:
                # The answer has the same number: whether it was asked for after an average.
                link.send(Message(MessageType.HEARTBEAT, sequence=int(self.contributors > 0), body=telemetry))
        self._stalls.look(self._name(), self.links, now_s)

    def _name(self) -> str:
        """Who this is, for the log."""
        rank = self.identity.worker
        return f"{'a reader' if rank == NOBODY else f'worker {rank}'} of job {self.options.job!r}"

    def crashed(self, error: PSEngineError) -> None:
        """The I/O thread ends."""
        self._stalls.look(self._name(), self.links, time.monotonic())  # the end of one may not have been seen yet
        self.fail(error)

    # ---- state and averages for others -------------------------------------------------------------------------

    def take_state_request(self) -> StateRequest | None:
        """A joiner that waits for this worker's state, once; None without one."""
        if not self._state_requests:
            return None
        request = self._state_requests.pop(next(iter(tuple(self._state_requests))))
        self._handled_requests.add(request)
        return request

    def forget_state_request(self, request: StateRequest) -> None:
        """It was not admitted; it may ask again."""
        self._handled_requests.discard(request)

    def _send_result(self, link: Link, message: Message, now_s: float) -> None:
        """A restarted server misses an average that this worker may have."""
        if link.is_result_under_way(message.key, message.sequence, now_s):
            return
        last = link.last_push(message.key)
        if message.key not in self.kept or last is None or last.sequence != message.sequence or not last.destinations:
            logger.warning("%s asks for an average that this worker has not: %d of chunk %d", link.address,
                           message.sequence, message.key)  # fmt: skip
            return
        # A copy: the next answer overwrites it while it may still be on its way out.
        result = Message(MessageType.RESULT, key=message.key, sequence=message.sequence, payload=last.result())
        link.send_result(result)
