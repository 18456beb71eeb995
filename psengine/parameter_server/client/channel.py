"""Requests over one connection to a server, and over the next one where it breaks. Pure.

    open ── connected ── greeting ── greeted: the requests without an answer are sent, in their order
      └────────────────── disconnected ── 50 ms to 500 ms ── open

Inside a connection nothing is lost. So a request is sent once on each connection, until it is answered.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from psengine.errors import FencedError, ProtocolError, PSEngineError, ServerLostError, ServerRefusedError
from psengine.parameter_server.client.operation import Operation, Request
from psengine.protocol.messages import NO_KEY, ErrorCode, Message, MessageType

if TYPE_CHECKING:
    from psengine.parameter_server.client.job_connection import JobConnection

REOPEN_S, REOPEN_MOST_S = 0.05, 0.5
# A connection that is not made by then is tried anew: the name may resolve now.
CONNECT_S = 5.0
MAX_GARBLED = 3  # after so many unreadable messages in a row every operation fails

# The answers that are not OK.
ANSWERS = {
    MessageType.LIST: MessageType.CHUNKS,
    MessageType.PULL: MessageType.VALUES,
    MessageType.STATUS: MessageType.STATUS_REPORT,
    MessageType.ECHO: MessageType.ECHOED,
}


class Channel:
    """See the module's text; subclasses greet.

    Args:
        job: of the client.
        number: of the link; see ``runtime``.
        address: for people, and for the transport.

    Attributes:
        is_connected, connected_s: there is a connection, and since when.
        is_up: and the server has answered the greeting.
        down_since_s: since when it is not; while it is, infinity.
        last_heard_s: when the last message came; None never.
        last_problem: the last problem, for errors; may be set by any thread.
        requests: those without an answer, by id.
    """

    def __init__(self, job: JobConnection, number: int, address: str) -> None:
        self.job, self.number, self.address = job, number, address
        self.is_connected = self.is_up = False
        self.down_since_s = self.connected_s = job.runtime.now_s()
        self.last_heard_s: float | None = None
        self.last_problem = ""
        self.requests: dict[int, Request] = {}
        self._open_at_s = math.inf
        self._wait_s = REOPEN_S
        # Submission time of the oldest operation that was answered since the last tick.
        self._moved_s = math.inf
        self._garbled = 0

    # ---- the connection ----------------------------------------------------------------------------------------

    def open(self, now_s: float) -> None:
        """Begin a new connection."""
        self.disconnected(now_s)
        self._open_at_s, self._wait_s = now_s + CONNECT_S, min(REOPEN_MOST_S, 2 * self._wait_s)
        self.job.transport.open(self.number, self.address, self.job.lease_s)

    def connected(self, now_s: float) -> None:
        """The connection is there."""
        self.is_connected, self.connected_s, self._open_at_s, self._wait_s = True, now_s, math.inf, REOPEN_S
        try:
            self.greet(now_s)
        except PSEngineError as error:  # nothing that the protocol allows
            self.job.fail(error)

    def disconnected(self, now_s: float) -> None:
        """There is no connection any more."""
        self.is_connected = self.is_up = False
        self.down_since_s = min(self.down_since_s, now_s)
        self._open_at_s = now_s + self._wait_s
        for request in tuple(self.requests.values()):
            request.is_sent = False
            if request.message.type is MessageType.ADMIN:  # which must not be done twice
                self.fail(request, ServerLostError(f"{self.address} ended the connection before it answered"))

    def greet(self, now_s: float) -> None:
        """Send the first messages of a connection."""
        raise NotImplementedError

    def greeted(self, now_s: float) -> None:
        """The greeting was answered: send what waits."""
        self.is_up, self.down_since_s = True, math.inf
        self._send_requests(now_s)

    def _send_requests(self, now_s: float) -> None:
        for request in tuple(self.requests.values()):
            self._send_request(request, now_s)

    def send(self, message: Message) -> bool:
        """Send a message in this client's name."""
        own = self.job.identity
        message.job, message.worker, message.incarnation = own.job, own.worker, own.incarnation
        return self.job.transport.send(self.number, message)

    # ---- requests ----------------------------------------------------------------------------------------------

    def begin(self, request: Request, now_s: float) -> None:
        """A request was submitted."""
        self.requests[request.message.sequence] = request
        self._send_request(request, now_s)

    def _send_request(self, request: Request, now_s: float) -> None:
        if self.is_up and not request.is_sent:
            request.is_sent = True
            try:
                self.send(request.message)
            except PSEngineError as error:
                self.fail(request, error)

    def receive_answer(self, message: Message, now_s: float) -> Request | None:
        """Take an answer; the request, where it has one that fits."""
        request = self.requests.pop(message.sequence, None)
        if request is None:
            return None
        asked = request.message
        if asked.type is not MessageType.LEAVE:  # other answers do not extend how long a session ends
            self._moved_s = min(self._moved_s, request.submitted_s)
        is_expected = message.type is ANSWERS.get(asked.type, MessageType.OK)
        if not is_expected or (asked.key != message.key and message.key != NO_KEY):
            got = f"{message.type.name} of key {message.key}"
            request.fail(ProtocolError(f"{self.address} answered {request.describe()} with {got}"))
            return None
        request.finish(message)
        return request

    # ---- time --------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Open the connection where there is none; fail operations that are overdue."""
        if now_s >= self._open_at_s:
            self.open(now_s)
        moved_s, self._moved_s = self._moved_s, math.inf
        for operation in self.open_operations():
            # An answer extends only the operations whose own time had not passed when its question was submitted;
            # others would be kept waiting for ever.
            if moved_s <= operation.submitted_s + operation.timeout_s and operation.message.type != MessageType.LEAVE:
                operation.deadline_s = max(operation.deadline_s, now_s + operation.timeout_s)
            elif now_s >= operation.deadline_s:
                self.fail(operation, self.no_answer(operation, now_s))

    def moved(self, now_s: float) -> None:
        """Bytes have left: what is under way is not late."""
        oldest = self.oldest()
        self._moved_s = min(self._moved_s, now_s if oldest is None else oldest.submitted_s)

    # ---- open operations ---------------------------------------------------------------------------------------

    def open_operations(self) -> list[Operation]:
        """The operations that have no answer."""
        return list(self.requests.values())

    def oldest(self) -> Operation | None:
        """The one that was submitted first."""
        return min(self.open_operations(), key=lambda operation: operation.submitted_s, default=None)

    # ---- endings -----------------------------------------------------------------------------------------------

    def fail(self, operation: Operation, error: PSEngineError) -> None:
        """End an operation without an answer."""
        self.requests.pop(operation.message.sequence, None)
        operation.fail(error)

    def fail_all(self, error: PSEngineError) -> None:
        """End everything."""
        for operation in reversed(self.open_operations()):
            self.fail(operation, error)

    def receive_garbled(self, error: ProtocolError) -> None:
        """Something came that is no message."""
        self._garbled += 1
        self.last_problem = str(error)
        if error.code == ErrorCode.VERSION or self._garbled >= MAX_GARBLED:
            self._garbled = 0
            self.job.fail(ProtocolError(f"{self.address} does not speak this protocol: {error}", error.code))

    def heard(self, now_s: float) -> None:
        """A message came."""
        self.last_heard_s = now_s
        self._garbled = 0

    def refusal(self, operation: Operation | None, message: Message) -> ServerRefusedError:
        """An ERROR as an error."""
        code, text = message.body["code"], message.body["text"]
        kind = FencedError if code == ErrorCode.FENCED else ServerRefusedError
        asked = "" if operation is None else f" {operation.describe()}"
        return kind(f"{self.address} refused{asked} ({code}): {text}", code)

    def no_answer(self, operation: Operation, now_s: float) -> ServerLostError:
        """The operation is overdue."""
        waited = f"{now_s - operation.submitted_s:.1f} s"
        last_s = self.last_heard_s
        heard = "it was never heard from" if last_s is None else f"last heard from {now_s - last_s:.1f} s ago"
        problem = operation.last_refusal or self.last_problem
        remark = f" The last problem was: {problem}." if problem else ""
        if whom := self.waits_for(operation):
            return ServerLostError(
                f"{self.address} holds {operation.describe()} since {waited} and waits for {whom} ({heard}).{remark} Is"
                " a worker stuck, or much slower than the others? Raise timeout_s if it is slow."
            )
        return ServerLostError(
            f"{self.address} did not answer {operation.describe()} for {waited} ({heard}).{remark} Is psengine-server"
            " running there, and is the port reachable from this host? If it is slow, raise the timeout: timeout_s, or"
            " --timeout-s of a command."
        )

    def waits_for(self, operation: Operation) -> str:
        """Whom the server waits for before it answers, in words; "" where that is not known."""
        return ""
