"""What is under way between this worker and one shard: what was sent, what to send again, what may be sent now.

Pure: messages in, calls to ``transmit`` out, the caller brings the time. Lives on the connection's I/O thread.

    request   sent ── wait ── marker (ECHO) ── it came back ── sent again
    push      in line (one per key) ── credit ── sent ── wait ── PROBE ┬ MISSING ── sent again
                                                                       ├ SENT ───── REPEAT
                                                                       └ PENDING ── wait ── PROBE ...

Nothing large is asked for twice because time passed: one connection keeps its order, so that the answer to a later
question proves that what is still open was lost. What was lost with a connection, the question on the next one shows.
Questions cost a few bytes; how long to wait before each is ``Patience``. HELLO, on a connection of its own, is small,
and sent again by the clock.

Each copy of a push, and each copy of its answer that was asked for, is a round. A probe carries the number of the
round, and its answer too: what is said of an earlier copy than the last proves nothing.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from psengine.errors import FencedError, ProtocolError, PSEngineError, ServerLostError, ServerRefusedError
from psengine.parameter_server.client import patience
from psengine.parameter_server.client.operation import Operation, Push, Request
from psengine.parameter_server.client.patience import Patience
from psengine.parameter_server.client.progress import Ledger
from psengine.protocol.messages import NO_KEY, NOBODY, PROTOCOL_VERSION, ErrorCode, Message, MessageType

logger = logging.getLogger(__name__)

# The socket had no connection; look again at the next tick.
RETRY_S = 0.05
DEFAULT_CREDIT_BYTES = 64 * 1024 * 1024
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
_LOST_MEMBERSHIP = (ErrorCode.FENCED, ErrorCode.NOT_MEMBER)


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
        is_paused: only what introduces this worker is sent.
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
        self.credit_bytes = DEFAULT_CREDIT_BYTES
        self.versions: dict[int, int] = {}
        self.ledger = Ledger()
        self.last_heard_s: float | None = None
        self.is_paused = True
        self._has_failed = False
        self.patience = Patience()
        self._identity = identity
        self._transmit = transmit
        self._lost_membership = lost_membership
        self._requests: dict[int, Request] = {}
        self._sent: dict[int, Push] = {}
        self._answered: dict[int, Push] = {}
        self._lines: dict[int, deque[Push]] = {}
        self._waiting: deque[Push] = deque()
        self._in_flight_bytes = 0
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
            line = self._lines.setdefault(operation.message.key, deque())
            line.append(operation)
            if len(line) == 1:
                self._waiting.append(operation)
                self._pump(now_s)
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

    def _send_push(self, push: Push, now_s: float) -> None:
        try:
            push.is_sent = self.send(push.message)
        except PSEngineError as error:
            self._fail(push, error, now_s)
        push.unanswered = 0
        push.next_at_s = now_s + (self._wait_s(push) if push.is_sent else RETRY_S)

    def _wait_s(self, push: Push) -> float:
        """How long to wait before asking about it; a few times within its deadline, which PENDING may move."""
        return min(self.patience.wait_s(push.unanswered), max(patience.PROBE_S, push.timeout_s / 4))

    def _ask_about(self, push: Push, kind: MessageType) -> bool:
        body = {"round": push.round}
        return self.send(Message(kind, key=push.message.key, sequence=push.message.sequence, body=body))

    def _probe(self, push: Push, now_s: float) -> None:
        if not self._ask_about(push, MessageType.PROBE):
            push.next_at_s = now_s + RETRY_S
            return
        if not push.unanswered:
            push.asked_s = now_s
        push.unanswered += 1
        push.next_at_s = now_s + self._wait_s(push)

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

    def _pump(self, now_s: float) -> None:
        """Send what credit allows; one push always may go."""
        waiting = self._waiting
        while waiting and not self.is_paused:
            size_bytes = waiting[0].size_bytes
            if self._in_flight_bytes and self._in_flight_bytes + size_bytes > self.credit_bytes:
                return
            push = waiting.popleft()
            self._sent[push.message.key] = push
            self._in_flight_bytes += size_bytes
            self.ledger.sent(push.message.key)
            self._send_push(push, now_s)

    # ---- time --------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Ask what became of what is late, and give up what is overdue."""
        self._extend_deadlines(now_s)
        needs_marker = False
        for request in tuple(self._requests.values()):
            if now_s >= request.deadline_s:
                self._fail(request, self._lost_error(request, now_s), now_s)
            elif now_s < request.next_at_s or (self.is_paused and not request.is_urgent):
                continue
            elif not request.is_sent or request.message.type is MessageType.HELLO:
                self._send_request(request, now_s)
            elif request.message.type not in _UNMARKED:
                needs_marker = True
        if needs_marker:
            self._send_marker(now_s)
        for line in tuple(self._lines.values()):
            for push in tuple(line):
                if now_s >= push.deadline_s:
                    self._fail(push, self._lost_error(push, now_s), now_s)
        if self.is_paused:
            return
        for push in tuple(self._sent.values()):
            if now_s < push.next_at_s:
                continue
            if push.is_sent:
                self._probe(push, now_s)
            else:
                self._send_push(push, now_s)

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
        return [*self._requests.values(), *(push for line in self._lines.values() for push in line)]

    def connected(self, now_s: float) -> None:
        """There is a new connection; what was under way on another may be lost."""
        for operation in (*self._requests.values(), *self._sent.values()):
            operation.unanswered = 0
            operation.next_at_s = now_s
        self.tick(now_s)

    def pause(self) -> None:
        """Membership is in doubt: hold everything but what is urgent."""
        self.is_paused = True

    def resume(self, now_s: float) -> None:
        """Membership is confirmed: what became of everything under way is asked; another server has none of it."""
        self.is_paused = False
        for request in self._requests.values():
            request.is_sent = request.is_sent and request.message.epoch == self.epoch
        self.connected(now_s)
        self._pump(now_s)

    def fail_pushes(self, error: PSEngineError, now_s: float) -> None:
        """End all pushes."""
        for line in tuple(self._lines.values()):
            for push in reversed(tuple(line)):
                self._fail(push, error, now_s)

    def fail_all(self, error: PSEngineError, now_s: float) -> None:
        """End everything."""
        was_paused, self.is_paused = self.is_paused, True
        for request in tuple(self._requests.values()):
            self._fail(request, error, now_s)
        self.fail_pushes(error, now_s)
        self.is_paused = was_paused

    # ---- answers -----------------------------------------------------------------------------------------------

    def receive(self, message: Message, now_s: float) -> None:
        """An answer came; repeats, and answers to what nobody asks any more, are ignored."""
        self._garbled = 0
        kind = message.type
        if kind is MessageType.UPDATED:
            push = self._sent.get(message.key)
            if push is not None and push.message.sequence == message.sequence:
                self._note_movement(push, now_s)
                self._has_failed = False
                self.versions[message.key] = message.version
                is_used = "refused" not in message.body
                self.ledger.answered(message.key, message.sequence, message.version, is_used=is_used)
                if push.finish(message, now_s) is None:
                    self._answered[message.key] = push
                self._remove_push(push, now_s)
        elif kind in (MessageType.PENDING, MessageType.MISSING, MessageType.SENT):
            self._receive_probed(message, now_s)
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

    def _receive_probed(self, message: Message, now_s: float) -> None:
        push = self._sent.get(message.key)
        if push is None or push.message.sequence != message.sequence:
            return
        if message.body.get("round", push.round) != push.round:
            return  # of an earlier copy
        if push.unanswered:
            self.patience.note_question(now_s - push.asked_s)
        push.unanswered = 0
        push.next_at_s = now_s + self._wait_s(push)
        if message.type is MessageType.PENDING:
            push.waiting_for = message.body.get("waiting_for", [])
            known_bytes, push.arrived_bytes = push.arrived_bytes, message.body.get("arrived_bytes", -1)
            if known_bytes != push.arrived_bytes:  # it is there now, or more of what it waits for
                push.deadline_s = max(push.deadline_s, now_s + push.timeout_s)
            return
        push.round += 1
        if message.type is MessageType.MISSING:
            self._send_push(push, now_s)
        else:
            self._ask_about(push, MessageType.REPEAT)

    def _receive_error(self, message: Message, now_s: float) -> None:
        code, text = message.body.get("code", ""), message.body.get("text", "")
        operation = self._find(message)
        if code == ErrorCode.VERSION and operation is None:
            self.fail_all(self._refusal(None, code, text), now_s)
        elif code in _LOST_MEMBERSHIP and not (isinstance(operation, Request) and operation.handles_refusal):
            self._receive_lost_membership(operation, code, text, now_s)
        elif operation is None:
            self._last_problem = f"it refused something ({code}): {text}"
            logger.warning("%s refused what nobody waits for (%s): %s", self.address, code, text)
        elif code == ErrorCode.SHUTTING_DOWN:
            operation.last_refusal = text
            operation.is_sent = isinstance(operation, Push)
            operation.next_at_s = now_s + patience.PROBE_S
        else:
            self._fail(operation, self._refusal(operation, code, text), now_s)

    def _receive_lost_membership(self, operation: Operation | None, code: str, text: str, now_s: float) -> None:
        if self.is_paused:
            return
        if isinstance(operation, Push) and code == ErrorCode.FENCED:
            operation.fenced_count += 1
            if operation.fenced_count > MAX_FENCED:  # in good standing, and fenced again: this exchange is over
                self._fail(operation, self._refusal(operation, code, text), now_s)
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
        if message.key != NO_KEY:
            push = self._sent.get(message.key)
            if push is not None and push.message.sequence == message.sequence:
                return push
        return self._requests.get(message.sequence)

    def oldest(self) -> Operation | None:
        """What was asked longest ago and is not answered yet."""
        open_operations = [*self._requests.values(), *(line[0] for line in self._lines.values())]
        return min(open_operations, key=lambda operation: operation.submitted_s, default=None)

    @property
    def open_count(self) -> int:
        """How much is not answered yet."""
        return len(self._requests) + sum(len(line) for line in self._lines.values())

    def tell_progress(self) -> None:
        """Send PROGRESS, without waiting for its answer."""
        for body in self.ledger.to_bodies(self._sent):
            self.send(Message(MessageType.PROGRESS, body=body))

    def keys_under_way(self) -> tuple[int, ...]:
        """The chunks that have an exchange which was sent and is not answered yet."""
        return tuple(self._sent)

    @property
    def is_level(self) -> bool:
        """Whether every exchange that this worker began was answered."""
        return not self._lines and not self._has_failed and self.ledger.has_answers

    def last_push(self, key: int) -> Push | None:
        """The chunk's push that was answered last."""
        return self._answered.get(key)

    # ---- endings -----------------------------------------------------------------------------------------------

    def _fail(self, operation: Operation, error: PSEngineError, now_s: float) -> None:
        operation.fail(error)
        if isinstance(operation, Push):
            self._has_failed = True
            self._remove_push(operation, now_s)
        else:
            self._requests.pop(operation.message.sequence, None)

    def _remove_push(self, push: Push, now_s: float) -> None:
        key = push.message.key
        if self._sent.get(key) is push:
            del self._sent[key]
            self._in_flight_bytes -= push.size_bytes
        elif push in self._waiting:
            self._waiting.remove(push)
        line = self._lines[key]
        was_first = line[0] is push
        line.remove(push)
        if not line:
            del self._lines[key]
        elif was_first:
            self._waiting.append(line[0])
        if self._waiting:
            self._pump(now_s)

    def _refusal(self, operation: Operation | None, code: str, text: str) -> ServerRefusedError:
        kind = FencedError if code == ErrorCode.FENCED else ServerRefusedError
        asked = f" {operation.describe()}" if operation is not None else ""
        return kind(f"{self.address} refused{asked} ({code}): {text}", code)

    def _lost_error(self, operation: Operation, now_s: float) -> ServerLostError:
        waited = f"{now_s - operation.submitted_s:.1f} s"
        if self.last_heard_s is None:
            heard = "it was never heard from"
        else:
            heard = f"last heard from {now_s - self.last_heard_s:.1f} s ago"
        problem = operation.last_refusal or self._last_problem
        remark = f" The last problem was: {problem}." if problem else ""
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
