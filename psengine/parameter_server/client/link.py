"""One client's operations at one shard: requests and pushes, from the first send to the answer.

Pure: messages come in, ``transmit`` sends them out, the caller gives the time. Runs on the client's I/O thread.

    request   sent ── wait ── marker (ECHO) ── the marker came back ── sent again
    push      see ``pushes``

Nothing large is sent twice because time passed. A connection keeps its order: once a marker has come back, every
request sent before it that has no answer was lost. After a reconnection the marker finds what the old connection lost.
Markers and probes cost a few bytes; ``Patience`` says how long to wait before each. HELLO has a connection of its own,
is small, and is repeated by the clock.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from psengine.errors import FencedError, ProtocolError, PSEngineError, ServerLostError, ServerRefusedError
from psengine.parameter_server.client import patience
from psengine.parameter_server.client.operation import Operation, Push, Request, says_hello_again
from psengine.parameter_server.client.patience import Patience
from psengine.parameter_server.client.progress import Ledger
from psengine.parameter_server.client.pushes import RETRY_S, Pushes
from psengine.protocol.messages import NO_KEY, NOBODY, ErrorCode, Message, MessageType

logger = logging.getLogger(__name__)

MAX_GARBLED = 3  # after so many unreadable messages in a row every operation fails
MAX_FENCED = 4  # recoveries after which a push that is fenced again fails

# The answers that are not OK.
ANSWERS = {
    MessageType.HELLO: MessageType.WELCOME,
    MessageType.LIST: MessageType.CHUNKS,
    MessageType.PULL: MessageType.VALUES,
    MessageType.STATUS: MessageType.STATUS_REPORT,
    MessageType.ECHO: MessageType.ECHOED,
}
# HELLO is repeated by the clock. ECHO never is: it measures, and a second one would hold up the first. Nor is ADMIN:
# the server may work on it for seconds, and must not do it twice.
_UNMARKED = frozenset({MessageType.HELLO, MessageType.ECHO, MessageType.ADMIN})
# Other answers do not extend their deadline: it bounds how long a server is looked for, and how long a session ends.
_STRICT = frozenset({MessageType.HELLO, MessageType.LEAVE, MessageType.BYE})
# The ids of markers lie above all others.
_FIRST_MARKER = 1 << 62


@dataclass(slots=True)
class Identity:
    """Who this client is to the servers; one object for all its links.

    Attributes:
        job: number of the job.
        worker: rank, NOBODY for readers and before WELCOME.
        incarnation: which life of the rank; 0 before WELCOME.
    """

    job: int
    worker: int = NOBODY
    incarnation: int = 0


class Link:
    """One shard.

    Args:
        index: of the shard among all of the job; 0 is the lead.
        address: for people.
        identity: of this client.
        transmit: hands a message to the socket; False where there is no connection now.
        lost_membership: called with a text when the shard says "fenced" or "not_member".

    Attributes:
        epoch: which life of the server this link knows; 0 none yet.
        versions: key -> version of the values that came last.
        ledger: the exchanges that the shard acknowledged.
        last_heard_s: when the last message came; None never.
        last_problem: the last problem, for errors; may be set by any thread.
        pushes: the exchanges under way.
        patience: how long to wait before asking about an operation.
    """

    def __init__(
        self,
        index: int,
        address: str,
        identity: Identity,
        transmit: Callable[[Message], bool],
        lost_membership: Callable[[str], None],
    ) -> None:
        self.index = index
        self.address = address
        self.epoch = 0
        self.versions: dict[int, int] = {}
        self.ledger = Ledger()
        self.last_heard_s: float | None = None
        self.last_problem = ""
        self.patience = Patience()
        self.pushes = Pushes(self.send, self.patience)
        self._identity = identity
        self._transmit = transmit
        self._lost_membership = lost_membership
        self._requests: dict[int, Request] = {}
        # Markers: the last that was sent, when, and the last that came back.
        self._marker, self._marked_s, self._proven = 0, -math.inf, 0
        # key -> (exchange, epoch, first marker behind it) of averages sent for a restarted server.
        self._results: dict[int, tuple[int, int, int]] = {}
        # Submission time of the oldest operation that was answered since the last tick.
        self._moved_s = math.inf
        self._garbled = 0

    # ---- asking ------------------------------------------------------------------------------------------------

    def begin(self, operation: Operation, now_s: float) -> None:
        """A worker's thread submitted an operation."""
        if isinstance(operation, Push):
            self.pushes.begin(operation, now_s)
            return
        assert isinstance(operation, Request)
        self._requests[operation.message.sequence] = operation
        if not self.is_paused or operation.is_urgent:
            self._send_request(operation, now_s)

    def send(self, message: Message) -> bool:
        """Send a message in this client's name; False where there is no connection now."""
        own = self._identity
        message.job, message.epoch = own.job, self.epoch
        message.worker, message.incarnation = own.worker, own.incarnation
        return self._transmit(message)

    def _send_request(self, request: Request, now_s: float) -> None:
        is_hello = request.message.type is MessageType.HELLO  # which names its sender itself
        try:
            request.is_sent = self._transmit(request.message) if is_hello else self.send(request.message)
        except PSEngineError as error:
            self._fail(request, error, now_s)
        request.mark, request.unanswered = self._marker + 1, 0
        wait_s = patience.PROBE_S if is_hello else self.patience.wait_s()
        request.next_at_s = now_s + (wait_s if request.is_sent else RETRY_S)

    def _send_marker(self, now_s: float) -> None:
        """Send a message whose answer comes behind those of everything sent so far."""
        payload = torch.zeros(1, dtype=torch.uint8)
        if not self.send(Message(MessageType.ECHO, sequence=_FIRST_MARKER + self._marker + 1, payload=payload)):
            return
        self._marker += 1
        self._marked_s = now_s
        for request in self._requests.values():
            if request.is_sent and request.message.type not in _UNMARKED:
                request.unanswered += 1
                request.next_at_s = now_s + self.patience.wait_s(request.unanswered)

    def is_result_under_way(self, key: int, sequence: int, now_s: float) -> bool:
        """Whether this average was sent to this life of the server, and is not known to be lost."""
        known_sequence, epoch, mark = self._results.get(key, (0, 0, 0))
        if (known_sequence, epoch) != (sequence, self.epoch) or mark <= self._proven:
            return False
        if self._marker < mark or now_s - self._marked_s >= self.patience.wait_s():
            self._send_marker(now_s)
        return True

    def send_result(self, message: Message) -> None:
        """Send RESULT: an average that a restarted server asked for."""
        if self.send(message):
            self._results[message.key] = (message.sequence, self.epoch, self._marker + 1)

    def tell_progress(self) -> None:
        """Send PROGRESS, without waiting for its answer."""
        for body in self.ledger.to_bodies():
            self.send(Message(MessageType.PROGRESS, body=body))

    # ---- time --------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Ask about operations that are late, and fail those that are overdue."""
        self._extend_deadlines(now_s)
        needs_marker = False
        for request in tuple(self._requests.values()):
            if now_s >= request.deadline_s:
                self._fail(request, self._no_answer(request, now_s), now_s)
            elif now_s < request.next_at_s or (self.is_paused and not request.is_urgent):
                continue
            elif not request.is_sent or request.message.type is MessageType.HELLO:
                self._send_request(request, now_s)
            elif request.message.type not in _UNMARKED:
                needs_marker = True
        if needs_marker:
            self._send_marker(now_s)
        for push in self.pushes.open():
            if now_s >= push.deadline_s:
                self._fail(push, self._no_answer(push, now_s), now_s)
        if not self.is_paused:
            self.pushes.tick(now_s)

    def _extend_deadlines(self, now_s: float) -> None:
        """While answers arrive, the operations behind them are not late.

        An answer extends only the operations whose own time had not passed when its question was submitted; others
        would be kept waiting for ever.
        """
        moved_s, self._moved_s = self._moved_s, math.inf
        if moved_s == math.inf:
            return
        for operation in self.open_operations():
            if moved_s <= operation.submitted_s + operation.timeout_s and operation.message.type not in _STRICT:
                operation.deadline_s = max(operation.deadline_s, now_s + operation.timeout_s)

    def connected(self, now_s: float) -> None:
        """A new connection: operations that were sent on another may be lost."""
        for operation in (*self._requests.values(), *self.pushes.sent.values()):
            operation.unanswered = 0
            operation.next_at_s = now_s
        self.tick(now_s)

    @property
    def is_paused(self) -> bool:
        """Whether only urgent requests are sent."""
        return self.pushes.is_paused

    def pause(self) -> None:
        """Membership is in doubt: hold everything that is not urgent."""
        self.pushes.is_paused = True

    def resume(self, now_s: float) -> None:
        """Membership is confirmed: ask about all in flight; repeat requests that an earlier life of the server had."""
        self.pushes.is_paused = False
        for request in self._requests.values():
            request.is_sent = request.is_sent and request.message.epoch == self.epoch
        self.connected(now_s)
        self.pushes.pump(now_s)

    def fence(self, error: FencedError, now_s: float) -> None:
        """End the operations of a live worker: this one has to rejoin. A JOIN under way is made anew at all shards."""
        for operation in reversed(self.open_operations()):
            if operation.is_of_a_live_worker or operation.message.type is MessageType.JOIN:
                self._fail(operation, error, now_s)

    def fail_all(self, error: PSEngineError, now_s: float) -> None:
        """End everything."""
        was_paused, self.pushes.is_paused = self.is_paused, True
        for operation in reversed(self.open_operations()):
            self._fail(operation, error, now_s)
        self.pushes.is_paused = was_paused

    # ---- answers -----------------------------------------------------------------------------------------------

    def receive(self, message: Message, now_s: float) -> None:
        """Take an answer. Repeated answers, and answers that nobody waits for any more, are ignored."""
        self._garbled = 0
        kind = message.type
        if kind is MessageType.UPDATED:
            push = self.pushes.find(message)
            if push is not None:
                self._note_movement(push, now_s)
                self.versions[message.key] = message.version
                self.ledger.answered(push.key, push.sequence, message.version)
                self.pushes.receive_updated(push, message, now_s)
        elif kind in (MessageType.PENDING, MessageType.MISSING, MessageType.SENT):
            self.pushes.receive_probed(message, now_s)
        elif kind is MessageType.ECHOED and message.sequence > _FIRST_MARKER:
            self._receive_marker(message.sequence - _FIRST_MARKER, now_s)
        elif kind is MessageType.ERROR:
            self._receive_error(message, now_s)
        else:
            self._receive_answer(message, now_s)

    def _note_movement(self, answered: Operation, now_s: float) -> None:
        self._moved_s = min(self._moved_s, answered.submitted_s)
        self.patience.note_answer(now_s - answered.submitted_s)

    def _receive_marker(self, marker: int, now_s: float) -> None:
        """Requests sent before this marker that have no answer were lost, or their answers were."""
        if marker == self._marker:
            self.patience.note_question(now_s - self._marked_s)
        self._proven = max(self._proven, marker)
        for request in tuple(self._requests.values()):
            may_go = request.is_urgent or not self.is_paused
            if request.is_sent and request.mark <= marker and request.message.type not in _UNMARKED and may_go:
                self._send_request(request, now_s)

    def _receive_answer(self, message: Message, now_s: float) -> None:
        request = self._requests.pop(message.sequence, None)
        if request is None:
            return
        asked = request.message
        if asked.type is not MessageType.HELLO:
            self._note_movement(request, now_s)
        is_expected = message.type is ANSWERS.get(asked.type, MessageType.OK)
        if not is_expected or (asked.key != message.key and message.key != NO_KEY):
            got = f"{message.type.name} of key {message.key}"
            request.fail(ProtocolError(f"{self.address} answered {request.describe()} with {got}"))
            return
        # The next gradient is computed from these values, whether they were read or written.
        is_stored = asked.type is MessageType.STORE and message.version > 0
        if (message.type is MessageType.VALUES or is_stored) and not asked.body:
            self.versions[message.key] = message.version
            self.ledger.saw(message.key, message.version)
        request.finish(message, now_s)

    def _receive_error(self, message: Message, now_s: float) -> None:
        code, text = message.body.get("code", ""), message.body.get("text", "")
        push = self.pushes.find(message) if message.key != NO_KEY else None
        operation = push or self._requests.get(message.sequence)
        if code == ErrorCode.VERSION and operation is None:
            self.fail_all(self._refusal(None, code, text), now_s)
        elif says_hello_again(operation, code):
            own = self.epoch, self._identity.incarnation
            # A life that has not said WELCOME: the server restarted once more.
            is_current = (message.epoch, message.incarnation) == own or message.epoch not in self.ledger.epochs
            if not is_current:
                return  # about what was sent before the last recovery, which has asked about all in flight anew
            if not self.is_paused:
                self._receive_lost_membership(operation, code, text, now_s)
            elif operation is None:  # lost while recovering: what was asked is not answered
                self._fail_urgent(code, text, now_s)
        elif operation is None:
            self.last_problem = f"it refused a message ({code}): {text}"
            logger.warning("%s refused a message that nobody waits for (%s): %s", self.address, code, text)
        elif code == ErrorCode.SHUTTING_DOWN:
            operation.last_refusal = text
            operation.is_sent = isinstance(operation, Push)
            operation.next_at_s = now_s + patience.PROBE_S
        else:
            self._fail(operation, self._refusal(operation, code, text), now_s)

    def _fail_urgent(self, code: str, text: str, now_s: float) -> None:
        for request in tuple(self._requests.values()):
            if request.is_urgent and request.is_sent and request.message.type is not MessageType.HELLO:
                self._fail(request, self._refusal(request, code, text), now_s)

    def _receive_lost_membership(self, operation: Operation | None, code: str, text: str, now_s: float) -> None:
        if isinstance(operation, Push) and code == ErrorCode.FENCED:
            operation.fenced_count += 1
            if operation.fenced_count > MAX_FENCED:
                self._fail(operation, self._refusal(operation, code, text), now_s)
                return
        self._lost_membership(f"{self.address}: {text}")

    def receive_garbled(self, error: ProtocolError, now_s: float) -> None:
        """Something came that is no message."""
        self._garbled += 1
        self.last_problem = str(error)
        if error.code == ErrorCode.VERSION or self._garbled >= MAX_GARBLED:
            self.fail_all(ProtocolError(f"{self.address} does not speak this protocol: {error}", error.code), now_s)
            self._garbled = 0

    # ---- open operations ---------------------------------------------------------------------------------------

    def open_operations(self) -> list[Operation]:
        """The operations that are not answered yet."""
        return [*self._requests.values(), *self.pushes.open()]

    def oldest(self) -> Operation | None:
        """The open operation that was submitted first."""
        return min(self.open_operations(), key=lambda operation: operation.submitted_s, default=None)

    @property
    def is_level(self) -> bool:
        """Whether every exchange that this worker began was answered."""
        return not self.pushes.open() and not self.pushes.has_failed and self.ledger.has_answers

    # ---- endings -----------------------------------------------------------------------------------------------

    def _fail(self, operation: Operation, error: PSEngineError, now_s: float) -> None:
        if isinstance(operation, Push):
            self.pushes.fail(operation, error, now_s)
        else:
            operation.fail(error)
            self._requests.pop(operation.message.sequence, None)

    def _refusal(self, operation: Operation | None, code: str, text: str) -> ServerRefusedError:
        kind = FencedError if code == ErrorCode.FENCED else ServerRefusedError
        asked = "" if operation is None else f" {operation.describe()}"
        return kind(f"{self.address} refused{asked} ({code}): {text}", code)

    def _no_answer(self, operation: Operation, now_s: float) -> ServerLostError:
        waited = f"{now_s - operation.submitted_s:.1f} s"
        last_s = self.last_heard_s
        heard = "it was never heard from" if last_s is None else f"last heard from {now_s - last_s:.1f} s ago"
        remark = (problem := operation.last_refusal or self.last_problem) and f" The last problem was: {problem}."
        if isinstance(operation, Push) and operation.waiting_for is not None:
            whom = f"workers {operation.waiting_for}" if operation.waiting_for else "other workers"
            return ServerLostError(
                f"{self.address} holds {operation.describe()} since {waited} and waits for {whom} ({heard}).{remark} Is"
                " a worker stuck, or much slower than the others? Raise timeout_s if it is slow."
            )
        return ServerLostError(
            f"{self.address} did not answer {operation.describe()} for {waited} ({heard}).{remark} Is psengine-server"
            " running there, and is the port reachable from this host? If it is slow, raise the timeout: timeout_s, or"
            " --timeout-s of a command."
        )
