"""Requests over one connection to a server, and over the next one where it breaks. Pure.

    open ── connected ── greeting ── greeted: the requests without an answer are sent, in their order
      └────────────────── disconnected ── 50 ms to 500 ms ── open, at the server's next address

Inside a connection nothing is lost. So a request is sent once on each connection, until it is answered. A connection
to who does not lead, or leads no more, ends.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from psengine.errors import (
    FencedError,
    JobMismatchError,
    ProtocolError,
    PSEngineError,
    ServerLostError,
    ServerRefusedError,
)
from psengine.parameter_server.client.known_server import KnownServer
from psengine.parameter_server.client.operation import Request
from psengine.protocol.messages import ErrorCode, Message, MessageType

if TYPE_CHECKING:
    from psengine.parameter_server.client.job_client import JobClient

RETRY_S, RETRY_MOST_S = 0.05, 0.5
# A connection that is not made by then is tried anew: the name may resolve now.
CONNECT_S = 5.0
CONNECT_HEARTBEATS = 2  # at the latest, where there is another address: its host may be gone
_REFUSALS: dict[str, type[ServerRefusedError]] = {
    ErrorCode.FENCED: FencedError,
    ErrorCode.RULE_MISMATCH: JobMismatchError,
    ErrorCode.VERSION: JobMismatchError,
}
MAX_GARBLED = 3  # after so many unreadable messages in a row every operation fails


class Channel:
    """See the module's text; subclasses greet, and take messages.

    Args:
        job: of the client.
        server: what is known of the server.
        shard: which of its shards.

    Attributes:
        address: where the present connection goes to, or the next one.
        is_connected: there is a connection.
        active_s: when it was made, or something came or left over it last.
        is_up: and the server has answered the greeting.
        down_since_s: since when it is not; while it is, infinity.
        retry_at_s: when a new connection is opened; where there is one, when it is greeted again.
        last_heard_s: when the last message of who leads came; None never.
        last_problem: the last problem, for errors; may be set by any thread.
        requests: those without an answer, by id.
    """

    def __init__(self, job: JobClient, server: KnownServer, shard: int = 0) -> None:
        self.job, self.server, self.shard = job, server, shard
        self.address = server.known(shard)[0]
        self.is_connected = self.is_up = False
        self.down_since_s = self.active_s = job.runtime.now_s()
        self.retry_at_s = math.inf
        self.last_heard_s: float | None = None
        self.last_problem = ""
        self.requests: dict[int, Request] = {}
        self._wait_s = RETRY_S
        # Submission time of the oldest operation that was answered since the last tick.
        self._moved_s = math.inf
        self._garbled = 0

    # ---- the connection ----------------------------------------------------------------------------------------

    @property
    def addresses(self) -> list[str]:
        """All that are known."""
        return self.server.known(self.shard) or [self.address]

    @property
    def name(self) -> str:
        """The shard's, as users name a server."""
        return "|".join(self.addresses)

    def open(self, now_s: float, address: str = "") -> None:
        """Begin a new connection; by default where the last one went to."""
        self.disconnected(now_s)
        self.address = address or self.address
        wait_s = CONNECT_S if len(self.addresses) == 1 else min(CONNECT_S, CONNECT_HEARTBEATS * self.job.heartbeat_s)
        self.retry_at_s, self._wait_s = now_s + wait_s, min(RETRY_MOST_S, 2 * self._wait_s)
        self.job.transport.open(self)

    def open_next(self, now_s: float) -> None:
        """Begin a new connection at the server's next address."""
        self.open(now_s, self.server.next_to(self.address, self.shard))

    def connected(self, now_s: float) -> None:
        """The connection is there."""
        self.is_connected, self.active_s = True, now_s
        self.greet(now_s)

    def disconnected(self, now_s: float) -> None:
        """There is no connection any more."""
        self.is_connected = self.is_up = False
        self.down_since_s = min(self.down_since_s, now_s)
        self.retry_at_s = now_s + self._wait_s / len(self.addresses)
        for request in tuple(self.requests.values()):
            request.is_sent = False
            if request.message.type is MessageType.ADMIN:  # which must not be done twice
                self.fail(request, ServerLostError(f"{self.address} ended the connection before it answered"))

    def not_let_in(self, error: PSEngineError) -> None:
        """The server refuses this client, or is not to be trusted. Elsewhere it may have let this client in."""
        self.last_problem = str(error)
        if self.last_heard_s is None or len(self.addresses) == 1:
            self.job.fail(error)

    def greet(self, now_s: float) -> None:
        """Send the first messages of a connection, or of another part in the job."""
        self.is_up = False
        if self.is_connected:
            self.retry_at_s = math.inf
            try:
                self.say_hello(now_s)
            except PSEngineError as error:  # nothing that the protocol allows
                self.job.fail(error)

    def say_hello(self, now_s: float) -> None:
        """Send them."""
        raise NotImplementedError

    def greeted(self, now_s: float) -> None:
        """The greeting was answered: send what waits."""
        self.is_up, self.down_since_s, self._wait_s = True, math.inf, RETRY_S
        self.send_requests()

    def send(self, message: Message) -> None:
        """Send a message in this client's name, where there is a connection."""
        if self.is_connected:
            own = self.job.identity
            message.job, message.worker, message.incarnation = own.job, own.worker, own.incarnation
            self.job.transport.send(self, message)

    # ---- requests ----------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """A request was submitted."""
        self.requests[request.message.sequence] = request
        self._send_request(request)

    def send_requests(self) -> None:
        """Send those that can be sent and were not."""
        for request in tuple(self.requests.values()):
            self._send_request(request)

    def _send_request(self, request: Request) -> None:
        if self.is_up and not request.is_sent:
            request.is_sent = True
            try:
                self.send(request.message)
            except PSEngineError as error:
                self.fail(request, error)

    def receive_answer(self, message: Message) -> Request | None:
        """Take an answer; its request, where that still waits."""
        request = self.requests.pop(message.sequence, None)
        if request is not None:
            if request.message.type is not MessageType.LEAVE:  # other answers do not extend how long a session ends
                self._moved_s = min(self._moved_s, request.submitted_s)
            request.finish(message)
        return request

    # ---- time --------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Open the connection where there is none; fail operations that are overdue."""
        if now_s >= self.retry_at_s:
            (self.greet if self.is_connected else self.open_next)(now_s)
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
        self.active_s = now_s
        oldest = self.oldest()
        self._moved_s = min(self._moved_s, now_s if oldest is None else oldest.submitted_s)

    # ---- open operations, endings ------------------------------------------------------------------------------

    def open_operations(self) -> list[Request]:
        """The operations that have no answer."""
        return list(self.requests.values())

    def oldest(self) -> Request | None:
        """The one that was submitted first."""
        return min(self.open_operations(), key=lambda operation: operation.submitted_s, default=None)

    def fail(self, operation: Request, error: PSEngineError) -> None:
        """End an operation without an answer."""
        self.requests.pop(operation.message.sequence, None)
        operation.fail(error)

    def received(self, message: Message, now_s: float) -> None:
        """A message came."""
        self.active_s, self._garbled = now_s, 0
        if self.job.fatal is not None or not self.is_connected:
            return
        if problem := self._objection(message):
            # Nothing else that it says is read.
            self.last_problem = f"{self.address}: {problem}"
            self.disconnected(now_s)
            return
        self.last_heard_s = now_s
        if self.server.heard(message, self.address, self.shard):
            self.job.gather(self.server, now_s)
        self.receive(message, now_s)

    def _objection(self, message: Message) -> str:
        """Why who sends this does not lead the server; "" where it does, or need not."""
        code = message.body["code"] if message.type is MessageType.ERROR else ""
        if code == ErrorCode.VERSION or not self.job.options.follows_lead:
            return ""
        is_follower = code == ErrorCode.NOT_LEADING
        return str(message.body["text"]) if is_follower else self.server.objection(message)

    def receive(self, message: Message, now_s: float) -> None:
        """Take a message."""
        raise NotImplementedError

    def garbled(self, error: ProtocolError) -> None:
        """Something came that is no message."""
        self._garbled += 1
        self.last_problem = str(error)
        if error.code == ErrorCode.VERSION or self._garbled >= MAX_GARBLED:
            self.job.fail(ProtocolError(f"{self.address} does not speak this protocol: {error}", error.code))

    def refusal(self, operation: Request | None, message: Message) -> ServerRefusedError:
        """An ERROR as an error."""
        code, text = message.body["code"], message.body["text"]
        kind = _REFUSALS.get(code, ServerRefusedError)
        asked = "" if operation is None else f" {operation.describe()}"
        return kind(f"{self.address} refused{asked} ({code}): {text}", code)

    def no_answer(self, operation: Request, now_s: float) -> ServerLostError:
        """The operation is overdue."""
        problem = f" The last problem was: {self.last_problem.rstrip('.')}." if self.last_problem else ""
        return ServerLostError(
            f"{self.name} did not answer {operation.describe()} for {now_s - operation.submitted_s:.1f} s."
            f" {self.why_late(operation, now_s)}{problem} If it is slow, raise the timeout: timeout_s, or --timeout-s"
            " of a command."
        )

    def why_late(self, operation: Request, now_s: float) -> str:
        """Why an operation may have no answer yet, in a sentence."""
        if whom := self.waits_for(operation):
            return f"The server has it, and waits for {whom}: stuck, dead or slow?"
        last_s = self.last_heard_s
        heard = "was never heard from" if last_s is None else f"was last heard from {now_s - last_s:.1f} s ago"
        return f"The server {heard}: does psengine-server run there, and is its port reachable from this host?"

    def waits_for(self, operation: Request) -> str:
        """Whom the server waits for before it answers, in words; "" where that is not known."""
        return ""
