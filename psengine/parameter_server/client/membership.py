"""A client's membership of a job: its identity, its questions to the shards, their answers, recovery after a loss.

    any thread       ask(link, message) ── do ──►  the I/O thread: link.begin
    the transport    received, connected, tick ──► links, heartbeats, the recovery under way
    a loss           "fenced", "not_member", a new epoch ──► hold ─ recover ─► resume: ask about all in flight

During a recovery everything but the handshake is held. Pure: clock, randomness and sockets come with the ``Runtime``.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from psengine.errors import AuthenticationError, FencedError, ProtocolError, PSEngineError, ServerLostError
from psengine.parameter_server.client.chunk_map import ChunkMap
from psengine.parameter_server.client.flow import Flow, SteppedFlow
from psengine.parameter_server.client.link import Identity, Link
from psengine.parameter_server.client.operation import Operation, Parking, Request
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.runtime import Runtime, Transport
from psengine.parameter_server.client.stalls import StallWatch
from psengine.parameter_server.client.state_requests import StateRequest, StateRequests
from psengine.protocol.layout import ChunkSpec, job_number
from psengine.protocol.messages import CONTROL, NOBODY, Message, MessageType
from psengine.tracing.stall_inspector import stall_after_s
from psengine.tracing.telemetry import Telemetry

logger = logging.getLogger(__name__)

# Request ids lie above any exchange number, so that an ERROR's sequence tells which of the two it is about.
FIRST_REQUEST = 1 << 40
# Recoveries that follow each other faster than this are slowed down.
CALM_S = 5.0
MAX_SLOW_DOWN_S = 2.0
# After so long without an answer a client looks whether its embedded server is still there.
EMBEDDED_SILENCE_S = 2.0


class Membership:
    """See the module's text. The ``Receiver`` of its transport.

    Args:
        options: of the session.
        runtime: the clock, randomness and sockets.
        recover: the flow that makes this client a member again: (membership, why it was lost, seconds to wait first).

    Attributes:
        identity: job, rank and incarnation.
        nonce: tells the servers this client from others that claim its rank.
        links: one per shard, the lead first.
        server_sizes: number of shards of each server, in the order of addresses; empty before the first handshake.
        chunks: where the job's chunks are.
        kept: keys whose averages stay where they arrived until the next one arrives.
        members: live workers, as the lead last said.
        has_roll: the lead has listed the live workers since this worker's first average, which waits for all workers.
        contributors: how many workers' gradients are in the last average.
        configured: chunk's key -> CONFIGURE's body, sent again to a server whose snapshot is older.
        takes_part: whether this worker has the job's values, or gave them. Before, a restarted server must not take it
            for one that has them.
        is_welcome: the servers have let this client in at least once.
        is_held: everything but the handshake waits.
        lease_s, heartbeat_s: as the lead said.
        next_heartbeat_s: when the next heartbeat is due.
        telemetry: the counters in this worker's heartbeats.
        fenced: why exchanges need a rejoin first; None while they go on.
        fatal: why nothing can go on; None while it can.
        state_requests: joiners that wait for this worker's state.
        closing: set when the session ends.
    """

    connection: Transport

    def __init__(
        self,
        options: SessionOptions,
        runtime: Runtime,
        recover: Callable[[Membership, str, float], Flow[None]],
    ) -> None:
        self.options = options
        self.runtime = runtime
        self.identity = Identity(job_number(options.job))
        self.nonce = runtime.draw_nonce()
        self.links: list[Link] = []
        self.server_sizes: list[int] = []
        self.chunks = ChunkMap()
        self.kept: set[int] = set()
        self.members: tuple[int, ...] = ()
        self.has_roll = False
        self.contributors = 0
        self.configured: dict[int, dict[str, Any]] = {}
        self.takes_part = False
        self.is_welcome = False
        self.is_held = True
        self.lease_s, self.heartbeat_s, self.next_heartbeat_s = 5.0, 1.0, 0.0
        self.telemetry = Telemetry(runtime.now_s)
        self.fenced: FencedError | None = None
        self.fatal: PSEngineError | None = None
        self.parking = Parking(runtime.now_s)
        self.state_requests = StateRequests()
        self.closing = threading.Event()
        self._ids = itertools.count(FIRST_REQUEST)
        # A worker's HELLO and heartbeats have a connection of their own; a reader has no lease to lose.
        self._sockets_per_link = 1 if options.role == "reader" else 2
        self._stalls = StallWatch(stall_after_s())
        self._next_look_s = 0.0
        self._recover = recover
        self._recovery: SteppedFlow[None] | None = None
        self._recovered_s = float("-inf")
        self._hasty_recoveries = 0
        self.connection = runtime.connect(self, options)

    def __str__(self) -> str:
        """Who this is, for the log."""
        rank = self.identity.worker
        return f"{'a reader' if rank == NOBODY else f'worker {rank}'} of job {self.options.job!r}"

    # ---- asking; any thread ------------------------------------------------------------------------------------

    def open(self, address: str) -> Link:
        """Connect to one more shard."""
        first = len(self.links) * self._sockets_per_link
        control = first + self._sockets_per_link - 1

        def transmit(message: Message) -> bool:
            return self.connection.send(control if message.type in CONTROL else first, message)

        link = Link(len(self.links), address, self.identity, transmit, self.lost_membership)
        self.links.append(link)
        for number in range(first, control + 1):
            self.connection.do(partial(self.connection.open, address, carries_payloads=number == first))
        self.runtime.watch(link, self.closing, min(self.options.connect_timeout_s, self.options.timeout_s))
        return link

    def first_links(self) -> list[Link]:
        """Each server's first shard."""
        return [self.links[sum(self.server_sizes[:server])] for server in range(len(self.server_sizes))]

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
        """Begin a request; its id is set here. See ``Request``."""
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

    def pause(self) -> None:
        """Hold everything but the handshake, until ``resume``."""
        self.connection.do(self._hold)

    def resume(self, fenced: FencedError | None = None) -> None:
        """Release the held operations; with ``fenced`` exchanges fail until a rejoin."""
        self.connection.do(self._resume, fenced)

    # ---- membership; the I/O thread ----------------------------------------------------------------------------

    def _hold(self) -> None:
        self.is_held = True
        for link in self.links:
            link.pause()

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

    def lost_membership(self, reason: str) -> None:
        """A shard does not know this incarnation of this worker: begin a recovery."""
        if self.is_held or not self.is_welcome or self.fatal is not None or self.closing.is_set():
            return
        self._hold()
        logger.warning("saying HELLO again to the servers of job %r: %s", self.options.job, reason)
        if self.runtime.now_s() - self._recovered_s >= CALM_S:
            self._hasty_recoveries, after_s = 0, 0.0
        else:
            self._hasty_recoveries += 1
            after_s = min(MAX_SLOW_DOWN_S, 0.05 * 2.0**self._hasty_recoveries)
        self._recovery = SteppedFlow(self._recover(self, reason, after_s))

    def _step_recovery(self, now_s: float) -> None:
        """Take the recovery under way as far as answers allow."""
        recovery = self._recovery
        if recovery is not None:
            recovery.step(now_s)
        if recovery is None or not recovery.is_over:
            return
        self._recovery = None
        self._recovered_s = now_s
        if (error := recovery.error) is None:
            return
        if not isinstance(error, PSEngineError):
            logger.error("the client's recovery failed", exc_info=error)
            error = PSEngineError(f"the client's recovery failed: {type(error).__name__}: {error}")
        if not self.closing.is_set():
            logger.error("cannot go on with job %r: %s", self.options.job, error)
        self.fail(error)

    def fail(self, error: PSEngineError) -> None:
        """Nothing can go on: every operation ends with ``error``."""
        if self.fatal is None:
            self.fatal = error
        for link in self.links:
            link.fail_all(self.fatal, self.runtime.now_s())

    # ---- called by the transport -------------------------------------------------------------------------------

    def received(self, index: int, message: Message, now_s: float) -> None:
        """A message came."""
        self._receive(self.links[index // self._sockets_per_link], message, now_s)
        self._step_recovery(now_s)

    def _receive(self, link: Link, message: Message, now_s: float) -> None:
        link.last_heard_s = now_s
        kind = message.type
        if kind is MessageType.WELCOME:
            link.epoch = message.epoch
            link.ledger.welcomed(link.epoch, message.body.get("durability", "memory"))
            link.pushes.credit_bytes = message.body["credit_bytes"]
            if link.index == 0:
                self.lease_s, self.heartbeat_s = message.body["lease_s"], message.body["heartbeat_s"]
        elif message.epoch != link.epoch and message.epoch and link.epoch:
            self.lost_membership(f"{link.address} was restarted")
            if kind is not MessageType.ERROR:
                return  # sent in a life that has ended: the server may have lost what it acknowledged then
        if kind is MessageType.UPDATED:
            self.contributors = message.body.get("contributors", 0)
            if self.contributors > len(self.members):
                self.next_heartbeat_s = 0.0  # a worker came: a restarted server would ask who takes part
        if kind is MessageType.HEARTBEAT_ACK:
            link.ledger.durable_version = max(link.ledger.durable_version, message.body["durable_version"] or 0)
            if link.index == 0:
                self.members = tuple(message.body["members"])
                self.has_roll = self.has_roll or message.sequence > 0
        elif kind is MessageType.STATE_WANTED:
            self.state_requests.hear(StateRequest(message.body["rank"], message.body["incarnation"]))
        elif kind is MessageType.RESULT_WANTED:
            self._send_result(link, message, now_s)
        elif kind is MessageType.PROGRESS_WANTED:
            link.tell_progress()
        else:
            link.receive(message, now_s)

    def garbled(self, index: int, error: ProtocolError, now_s: float) -> None:
        """Something came that is no message."""
        link = self.links[index // self._sockets_per_link]
        logger.warning("%s sent what is no message: %s", link.address, error)
        link.receive_garbled(error, now_s)

    def connected(self, index: int, now_s: float) -> None:
        """A socket has a new connection."""
        link, number = divmod(index, self._sockets_per_link)
        if number == 0:  # that of payloads
            self.links[link].connected(now_s)

    def rejected(self, index: int, error: AuthenticationError, now_s: float) -> None:
        """A server does not let this client in."""
        self.fail(error)

    def tick(self, now_s: float) -> None:
        """100 ms have passed."""
        beats = self.is_welcome and now_s >= self.next_heartbeat_s and self.options.role == "worker"
        if beats:
            self.next_heartbeat_s = now_s + self.heartbeat_s
            telemetry = self.telemetry.to_body()
            says_waits = self.options.has_answers_held and self.telemetry.is_blocked and self._are_pushes_held()
        for link in tuple(self.links):
            link.tick(now_s)
            if beats and not link.is_paused:
                body = telemetry | {"waits": link.pushes.open_numbers} if says_waits else telemetry
                # The answer has the same number: it tells whether the heartbeat followed an average.
                link.send(Message(MessageType.HEARTBEAT, sequence=int(self.contributors > 0), body=body))
        if self.options.is_embedded and now_s >= self._next_look_s:
            self._next_look_s = now_s + EMBEDDED_SILENCE_S
            self._look_for_embedded(now_s)
        self._step_recovery(now_s)
        self._stalls.look(self, self.links, now_s)

    def _are_pushes_held(self) -> bool:
        """Whether pushes are open, and the servers have all of them. One that was answered may be followed at once."""
        pushes = [push for link in self.links for push in link.pushes.open()]
        return bool(pushes) and all(push.is_held for push in pushes)

    def _look_for_embedded(self, now_s: float) -> None:
        """An embedded server that ended does not come back: nobody waits for its answers until a deadline."""
        for link in tuple(self.links):
            asked = link.oldest()
            # A server that holds an answer still acknowledges heartbeats.
            latest_s = now_s - max(EMBEDDED_SILENCE_S, 2 * self.heartbeat_s)
            if asked is None or max(asked.submitted_s, link.last_heard_s or 0.0) > latest_s:
                continue
            with suppress(OSError):  # such as no free descriptor to look with
                if self.runtime.is_listening(link.address):
                    continue
                text = (
                    f"the embedded parameter server at {link.address} is gone (expected an answer to"
                    f" {asked.describe()}): rank 0, which started it, failed or closed its strategy. See its output."
                )
                self.fail(ServerLostError(text))

    def crashed(self, error: PSEngineError) -> None:
        """The transport has ended."""
        self._stalls.look(str(self), self.links, self.runtime.now_s())  # the end of a stall may be unseen yet
        self.fail(error)

    # ---- averages for others -----------------------------------------------------------------------------------

    def _send_result(self, link: Link, message: Message, now_s: float) -> None:
        """A restarted server misses an average that this worker may have."""
        if link.is_result_under_way(message.key, message.sequence, now_s):
            return
        last = link.pushes.last_answered(message.key)
        if message.key not in self.kept or last is None or last.sequence != message.sequence or not last.destinations:
            logger.warning("%s asks for average %d of chunk %d: not kept", link.address, message.sequence, message.key)
            return
        # ``result`` is a copy: the next answer may overwrite the values while they are being sent.
        link.send_result(Message(MessageType.RESULT, key=message.key, sequence=message.sequence, payload=last.result()))
