"""A client's side of the protocol: what servers say, heartbeats, and coming back after a lost lease or a restart. Pure.

    a message, a tick ──► received, tick ──► the links' sends, the flow of a recovery
    fenced | not_member | new epoch ──► hold ─ HELLO lead ─ HELLO others ─ (register again) ─► resume: ask what is open

Sockets, clock and randomness come with the ``Runtime``. What is under way is held during a recovery, and nothing is
asked twice: pushes are probed first.
"""

from __future__ import annotations

import logging

from psengine.errors import AuthenticationError, ProtocolError, PSEngineError
from psengine.parameter_server.client.flow import SteppedFlow
from psengine.parameter_server.client.link import Link
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.own_membership import OwnMembership, StateRequest
from psengine.parameter_server.client.recovery import recover
from psengine.parameter_server.client.runtime import Runtime
from psengine.parameter_server.client.stalls import StallWatch
from psengine.parameter_server.client.telemetry import Telemetry
from psengine.protocol.messages import Message, MessageType
from psengine.tracing.stall_inspector import stall_after_s

logger = logging.getLogger(__name__)

# Recoveries that follow each other faster than this are slowed down.
CALM_S = 5.0
MAX_SLOW_DOWN_S = 2.0


class ClientCore:
    """See the module's text. The ``Receiver`` of a transport: all but ``take_state_request`` runs on its thread.

    Attributes:
        membership: who this client is, and how its servers are asked.
        telemetry: what heartbeats say of it.
        lease_s, heartbeat_s: as the lead said.
        kept: keys whose averages stay where they arrived until the next is there.
    """

    def __init__(self, options: SessionOptions, runtime: Runtime) -> None:
        self.telemetry = Telemetry(runtime.now_s)
        self.lease_s = 5.0
        self.heartbeat_s = 1.0
        self.kept: set[int] = set()
        self._runtime = runtime
        self._stalls = StallWatch(stall_after_s())
        self._state_requests: dict[int, StateRequest] = {}
        self._handled_requests: set[StateRequest] = set()
        self._recovery: SteppedFlow[None] | None = None
        self._recovered_s = float("-inf")
        self._hasty_recoveries = 0
        self.membership = OwnMembership(options, runtime, self.lost_membership)
        self.membership.connect(self)

    # ---- recovery ----------------------------------------------------------------------------------------------

    def lost_membership(self, reason: str) -> None:
        """A shard does not know this incarnation of us any more."""
        membership = self.membership
        is_known = membership.is_held or not membership.is_welcome
        if is_known or membership.fatal is not None or membership.closing.is_set():
            return
        membership.hold()
        logger.warning("saying HELLO again to the servers of job %r: %s", membership.options.job, reason)
        self._recovery = SteppedFlow(recover(membership, reason, self._slow_down_s()))

    def _slow_down_s(self) -> float:
        """How long to wait before the next recovery."""
        if self._runtime.now_s() - self._recovered_s >= CALM_S:
            self._hasty_recoveries = 0
            return 0.0
        self._hasty_recoveries += 1
        return min(MAX_SLOW_DOWN_S, 0.05 * 2.0**self._hasty_recoveries)

    def _recover(self, now_s: float) -> None:
        """Take the recovery under way as far as answers allow."""
        recovery = self._recovery
        if recovery is None:
            return
        recovery.step(now_s)
        if not recovery.is_over:
            return
        self._recovery = None
        self._recovered_s = now_s
        if isinstance(recovery.error, PSEngineError):
            self._give_up(recovery.error)
        elif recovery.error is not None:
            logger.error("the client's recovery failed", exc_info=recovery.error)
            what = f"{type(recovery.error).__name__}: {recovery.error}"
            self._give_up(PSEngineError(f"the client's recovery failed: {what}"))

    def _give_up(self, error: PSEngineError) -> None:
        if not self.membership.closing.is_set():
            logger.error("cannot go on with job %r: %s", self.membership.options.job, error)
        self.fail(error)

    def fail(self, error: PSEngineError) -> None:
        """Nothing can go on."""
        membership = self.membership
        if membership.fatal is None:
            membership.fatal = error
        now_s = self._runtime.now_s()
        for link in membership.links:
            link.fail_all(membership.fatal, now_s)

    # ---- what the transport calls ------------------------------------------------------------------------------

    def received(self, index: int, message: Message, now_s: float) -> None:
        """A message came."""
        self._receive(self.membership.link_of(index), message, now_s)
        self._recover(now_s)

    def _receive(self, link: Link, message: Message, now_s: float) -> None:
        membership = self.membership
        link.last_heard_s = now_s
        kind = message.type
        if kind is MessageType.WELCOME:
            link.epoch, link.server_version = message.epoch, message.peer_version
            link.ledger.epoch = link.ledger.epoch or link.epoch
            link.pushes.credit_bytes = message.body["credit_bytes"]
            if link.index == 0:
                self.lease_s, self.heartbeat_s = message.body["lease_s"], message.body["heartbeat_s"]
        elif message.epoch != link.epoch and message.epoch and link.epoch:
            self.lost_membership(f"{link.address} was restarted")
            if kind is not MessageType.ERROR:
                return  # of a life that has ended: what it acknowledged then is not what the server has now
        if kind is MessageType.UPDATED:
            membership.contributors = message.body.get("contributors", 0)
            if membership.contributors > len(membership.members):
                membership.next_heartbeat_s = 0.0  # somebody came: a restarted server would ask who takes part
        if kind is MessageType.HEARTBEAT_ACK:
            if link.index == 0:
                membership.members = tuple(message.body["members"])
                membership.has_roll = membership.has_roll or message.sequence > 0
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
        link = self.membership.link_of(index)
        logger.warning("%s sent what is no message: %s", link.address, error)
        link.receive_garbled(error, now_s)

    def connected(self, index: int, now_s: float) -> None:
        """A socket has a new connection."""
        if self.membership.carries_payloads(index):
            self.membership.link_of(index).connected(now_s)

    def rejected(self, index: int, error: AuthenticationError, now_s: float) -> None:
        """A server does not let this client in."""
        self.fail(error)

    def tick(self, now_s: float) -> None:
        """100 ms have passed."""
        membership = self.membership
        beats = membership.is_welcome and now_s >= membership.next_heartbeat_s and membership.options.role == "worker"
        if beats:
            membership.next_heartbeat_s = now_s + self.heartbeat_s
            telemetry = self.telemetry.to_body()
        for link in tuple(membership.links):
            link.tick(now_s)
            if beats and not link.is_paused:
                # The answer has the same number: whether it was asked for after an average.
                link.send(Message(MessageType.HEARTBEAT, sequence=int(membership.contributors > 0), body=telemetry))
        self._recover(now_s)
        self._stalls.look(str(membership), membership.links, now_s)

    def crashed(self, error: PSEngineError) -> None:
        """The transport has ended."""
        # The end of a stall may not have been seen yet.
        self._stalls.look(str(self.membership), self.membership.links, self._runtime.now_s())
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
        last = link.pushes.last_answered(message.key)
        if message.key not in self.kept or last is None or last.sequence != message.sequence or not last.destinations:
            logger.warning("%s asks for an average that this worker has not: %d of chunk %d", link.address,
                           message.sequence, message.key)  # fmt: skip
            return
        # A copy: the next answer overwrites it while it may still be on its way out.
        result = Message(MessageType.RESULT, key=message.key, sequence=message.sequence, payload=last.result())
        link.send_result(result)
