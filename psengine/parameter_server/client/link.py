"""What is under way between this worker and one shard: what was sent, what to send again, what may be sent now.

Pure: messages in, calls to ``transmit`` out, the caller brings the time. Lives on the connection's I/O thread.

    request   sent ── wait ── marker (ECHO) ── it came back ── sent again
    push      see ``pushes``

Nothing large is asked for twice because time passed: one connection keeps its order, so that the answer to a later
question proves that what is still open was lost. What was lost with a connection, the question on the next one shows.
Questions cost a few bytes; how long to wait before each is ``Patience``. HELLO, on a connection of its own, is small,
and sent again by the clock.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from psengine.errors import FencedError, ProtocolError, PSEngineError, ServerLostError
from psengine.parameter_server.client import patience
from psengine.parameter_server.client.link_errors import no_answer, refusal, says_hello_again
from psengine.parameter_server.client.operation import Operation, Push, Request
from psengine.parameter_server.client.patience import Patience
from psengine.parameter_server.client.progress import Ledger
from psengine.parameter_server.client.pushes import RETRY_S, Pushes
from psengine.protocol.messages import NO_KEY, NOBODY, PROTOCOL_VERSION, ErrorCode, Message, MessageType

logger = logging.getLogger(__name__)

# So many answers in a row that nobody can read, and waiting on is pointless.
MAX_GARBLED = 3
# A push that outlives so many recoveries is itself what is refused.
MAX_FENCED = 4

ANSWERS = {
    MessageType.HELLO: MessageType.WELCOME,
    MessageType.REGISTER: MessageType.OK,
    MessageType.SEAL: MessageType.OK,
    MessageType.CONFIGURE: MessageType.OK,
    MessageType.LIST: MessageType.CHUNKS,
    MessageType.PULL: MessageType.VALUES,
    MessageType.STORE: MessageType.OK,
    MessageType.JOIN: MessageType.OK,
    MessageType.ADMIT: MessageType.OK,
    MessageType.STATUS: MessageType.STATUS_REPORT,
    MessageType.SNAPSHOT: MessageType.OK,
    MessageType.BYE: MessageType.OK,
    MessageType.ECHO: MessageType.ECHOED,
    MessageType.PROGRESS: MessageType.OK,
    MessageType.LEAVE: MessageType.OK,
}
# HELLO is repeated by the clock, ECHO never: a second one would hold up the first, whose time is taken.
_UNMARKED = frozenset({MessageType.HELLO, MessageType.ECHO})
# Their time runs whatever else moves: how long a server may take to be found, and a session to end.
_STRICT = frozenset({MessageType.HELLO, MessageType.LEAVE, MessageType.BYE})
# The ids of markers lie above all others; what they carry does not matter.
_FIRST_MARKER = 1 << 62
_MARKER_BYTES = 1


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
        index: place among all the job's shards; 0 is the lead.
        address: for people.
        identity: who asks.
        transmit: hands a message to the socket; False where there is no connection now.
        lost_membership: called with a text when the shard says "fenced" or "not_member".

    Attributes:
        epoch: which life of the server this link knows; 0 none yet.
        server_version: protocol version that the shard speaks; our own before WELCOME.
        versions: key -> version of the values that came last.
        ledger: what the shard acknowledged.
        last_heard_s: when the last message came; None never.
        pushes: the exchanges under way.
        is_paused: only what introduces this worker is sent; see ``pause``.
        patience: how long to wait before asking what became of something.
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
        self.server_version = PROTOCOL_VERSION
        self.versions: dict[int, int] = {}
        self.ledger = Ledger()
        self.last_heard_s: float | None = None
        self.patience = Patience()
        self.pushes = Pushes(self.send, self.ledger, self.patience)
        self._identity = identity
        self._transmit = transmit
        self._lost_membership = lost_membership
        self._requests: dict[int, Request] = {}
        # Markers: the last that was sent, when, and the last that came back.
        self._marker = 0
        self._marked_s = -math.inf
        self._proven = 0
        # key -> (exchange, epoch, first marker behind it) of averages sent for a restarted server.
        self._results: dict[int, tuple[int, int, int]] = {}
        # When the oldest of what was answered since the last tick had been submitted.
        self._moved_s = math.inf
        self._garbled = 0
        self._last_problem = ""

    # ---- asking ------------------------------------------------------------------------------------------------

    def begin(self, operation: Operation, now_s: float) -> None:
        """A worker's thread asks for something."""
        if isinstance(operation, Push):
            self.pushes.begin(operation, now_s)
            return
        assert isinstance(operation, Request)
        self._requests[operation.message.sequence] = operation
        if not self.is_paused or operation.is_urgent:
            self._send_request(operation, now_s)

    def send(self, message: Message) -> bool:
        """Send something that has no answer to wait for."""
        message.job = self._identity.job
        message.epoch = self.epoch
        message.worker = self._identity.worker
        message.incarnation = self._identity.incarnation
        return self._transmit(message)

    def _send_request(self, request: Request, now_s: float) -> None:
        try:
            if request.message.type is MessageType.HELLO:  # says itself who it is from
                request.is_sent = self._transmit(request.message)
            else:
                request.is_sent = self.send(request.message)
        except PSEngineError as error:
            self._fail(request, error, now_s)
        request.mark, request.unanswered = self._marker + 1, 0
        if not request.is_sent:
            wait_s = RETRY_S
        else:
            wait_s = patience.PROBE_S if request.message.type is MessageType.HELLO else self.patience.wait_s()
        request.next_at_s = now_s + wait_s

    def _send_marker(self, now_s: float) -> None:
        """Ask for an answer that comes behind those of everything sent so far."""
        payload = torch.zeros(_MARKER_BYTES, dtype=torch.uint8)
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
        """RESULT: an average that a restarted server asked for."""
        if self.send(message):
            self._results[message.key] = (message.sequence, self.epoch, self._marker + 1)

    # ---- time --------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Ask what became of what is late, and give up what is overdue."""
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
        """While answers arrive, what waits behind them is not late.

        Answers to what was asked after somebody's own time had passed do not count: others must not keep it waiting
        for ever.
        """
        moved_s, self._moved_s = self._moved_s, math.inf
        if moved_s == math.inf:
            return
        for operation in self._open_operations():
            if moved_s <= operation.submitted_s + operation.timeout_s and operation.message.type not in _STRICT:
                operation.deadline_s = max(operation.deadline_s, now_s + operation.timeout_s)

    def _open_operations(self) -> list[Operation]:
        return [*self._requests.values(), *self.pushes.open()]

    def connected(self, now_s: float) -> None:
        """There is a new connection; what was under way on another may be lost."""
        for operation in (*self._requests.values(), *self.pushes.sent.values()):
            operation.unanswered = 0
            operation.next_at_s = now_s
        self.tick(now_s)

    @property
    def is_paused(self) -> bool:
        """Whether only what introduces this worker is sent."""
        return self.pushes.is_paused

    def pause(self) -> None:
        """Membership is in doubt: hold everything but what is urgent."""
        self.pushes.is_paused = True

    def resume(self, now_s: float) -> None:
        """Membership is confirmed: what became of everything under way is asked; another server has none of it."""
        self.pushes.is_paused = False
        for request in self._requests.values():
            request.is_sent = request.is_sent and request.message.epoch == self.epoch
        self.connected(now_s)
        self.pushes.pump(now_s)

    def fence(self, error: FencedError, now_s: float) -> None:
        """End what only a live worker may ask for: this one has to rejoin."""
        for request in tuple(self._requests.values()):
            if request.is_of_a_live_worker:
                self._fail(request, error, now_s)
        self.pushes.fail_all(error, now_s)

    def fail_all(self, error: PSEngineError, now_s: float) -> None:
        """End everything."""
        was_paused, self.pushes.is_paused = self.is_paused, True
        for request in tuple(self._requests.values()):
            self._fail(request, error, now_s)
        self.pushes.fail_all(error, now_s)
        self.pushes.is_paused = was_paused

    # ---- answers -----------------------------------------------------------------------------------------------

    def receive(self, message: Message, now_s: float) -> None:
        """An answer came; repeats, and answers to what nobody asks any more, are ignored."""
        self._garbled = 0
        kind = message.type
        if kind is MessageType.UPDATED:
            push = self.pushes.find(message)
            if push is not None:
                self._note_movement(push, now_s)
                self.versions[message.key] = message.version
                is_used = "refused" not in message.body
                self.ledger.answered(message.key, message.sequence, message.version, is_used=is_used)
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
        if ANSWERS.get(asked.type) is not message.type or (asked.key != message.key and message.key != NO_KEY):
            text = f"{self.address} answered {request.describe()} with {message.type.name} of key {message.key}"
            request.fail(ProtocolError(text))
            return
        # Read or written, these are the values that the next gradient is computed from.
        is_stored = asked.type is MessageType.STORE and message.version > 0
        if (message.type is MessageType.VALUES or is_stored) and not asked.body:
            self.versions[message.key] = message.version
            self.ledger.saw(message.key, message.version)
        request.finish(message, now_s)

    def _receive_error(self, message: Message, now_s: float) -> None:
        code, text = message.body.get("code", ""), message.body.get("text", "")
        operation = self._find(message)
        if code == ErrorCode.VERSION and operation is None:
            self.fail_all(refusal(self.address, None, code, text), now_s)
        elif says_hello_again(operation, code):
            self._receive_lost_membership(operation, code, text, now_s)
        elif operation is None:
            self._last_problem = f"it refused something ({code}): {text}"
            logger.warning("%s refused what nobody waits for (%s): %s", self.address, code, text)
        elif code == ErrorCode.SHUTTING_DOWN:
            operation.last_refusal = text
            operation.is_sent = isinstance(operation, Push)
            operation.next_at_s = now_s + patience.PROBE_S
        else:
            self._fail(operation, refusal(self.address, operation, code, text), now_s)

    def _receive_lost_membership(self, operation: Operation | None, code: str, text: str, now_s: float) -> None:
        if self.is_paused:
            return
        if isinstance(operation, Push) and code == ErrorCode.FENCED:
            operation.fenced_count += 1
            if operation.fenced_count > MAX_FENCED:  # in good standing, and fenced again: this exchange is over
                self._fail(operation, refusal(self.address, operation, code, text), now_s)
                return
        self._lost_membership(f"{self.address}: {text}")

    def note_problem(self, problem: str) -> None:
        """Why nothing may ever come, for the error; any thread."""
        self._last_problem = problem

    def receive_garbled(self, error: ProtocolError, now_s: float) -> None:
        """Something came that is no message."""
        self._garbled += 1
        self._last_problem = str(error)
        if error.code == ErrorCode.VERSION or self._garbled >= MAX_GARBLED:
            text = f"{self.address} does not speak this protocol: {error}"
            self.fail_all(ProtocolError(text, error.code), now_s)
            self._garbled = 0

    def _find(self, message: Message) -> Operation | None:
        push = self.pushes.find(message) if message.key != NO_KEY else None
        return push or self._requests.get(message.sequence)

    def oldest(self) -> Operation | None:
        """What was asked longest ago and is not answered yet."""
        return min(self._open_operations(), key=lambda operation: operation.submitted_s, default=None)

    @property
    def open_count(self) -> int:
        """How much is not answered yet."""
        return len(self._open_operations())

    def tell_progress(self) -> None:
        """Send PROGRESS, without waiting for its answer."""
        for body in self.ledger.to_bodies(self.pushes.sent):
            self.send(Message(MessageType.PROGRESS, body=body))

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

    def _no_answer(self, operation: Operation, now_s: float) -> ServerLostError:
        return no_answer(self.address, operation, self.last_heard_s, self._last_problem, now_s)
