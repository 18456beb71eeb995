"""One client's connection to a shard: its greeting, pushes and requests. Pure; runs on the client's I/O thread.

    connected ── VIEW ── RESUME(key, open pushes) ── RESUMED(missing) ── those again, then what waits
    push      waiting ── credit, and a view that names this life of the shard ── sent ── UPDATED
    request   waiting ── credit ── sent ── answered

Who greets: a reader says nothing of itself; a worker that registers chunks, and a member of the job's view, show the
job's key; a member names its open pushes.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from psengine.errors import PSEngineError
from psengine.parameter_server.client.channel import RETRY_MOST_S, Channel
from psengine.parameter_server.client.known_server import KnownServer
from psengine.parameter_server.client.operation import Push, Request
from psengine.protocol.messages import ErrorCode, Message, MessageType

if TYPE_CHECKING:
    from psengine.parameter_server.client.job_connection import JobConnection

# What a shard cannot answer between its restart, the view that names its new life, and its chunks.
_OF_VALUES = frozenset({MessageType.PULL, MessageType.STORE, MessageType.LIST, MessageType.CONFIGURE})
_OF_COORDINATOR = frozenset({MessageType.VIEW, MessageType.RELEASE})
_FATAL = (ErrorCode.VERSION, ErrorCode.STATE_LOST, ErrorCode.OTHER_SERVERS)
_FATAL_TO_REGISTRAR = (ErrorCode.RULE_MISMATCH, ErrorCode.BAD_VALUE, ErrorCode.MEMORY)
# What may be on its way to a server and unanswered. Several servers answer when the slowest worker's bytes are there.
# With little on its way a fast worker waits for a slow one, which then has the link to itself: workers go in step, and
# no link idles while others are full. (Four hosts, 100 Mbit/s: 2 MiB take 1.02 of a ring's time, 4 MiB 1.12.)
CREDIT_BYTES = 64 * 1024 * 1024
CREDIT_BYTES_OF_SEVERAL_SERVERS = 2 * 1024 * 1024
REQUESTED_BYTES = 32 * 1024 * 1024


class Link(Channel):
    """One shard.

    Attributes:
        index: of the shard among all of the job; 0 is the lead's first.
        epoch: which life of the shard this is; 0 none yet.
        may_push: see the module's text; ``JobConnection`` keeps it.
        has_chunks: the shard has all of the job's that are there; in a view each RESUMED decides it anew.
        resumed: the body of the last RESUMED.
        versions: key -> version of the values that came last.
        sent: key -> the chunk's push that was sent and is not answered yet.
        waiting: the pushes that are not sent.
    """

    job: JobConnection

    def __init__(self, job: JobConnection, index: int, server: KnownServer, shard: int) -> None:
        super().__init__(job, server, shard)
        self.index = index
        self.epoch = 0
        self.may_push = self.has_chunks = False
        self.resumed: dict[str, Any] = {}
        self.versions: dict[int, int] = {}
        self.sent: dict[int, Push] = {}
        self.waiting: deque[Push] = deque()
        self._in_flight_bytes = self._requested_bytes = self._greeting = 0
        # How long it may leave a question open before its other address is tried.
        self._patience_leases = 1

    # ---- greeting ----------------------------------------------------------------------------------------------

    @override
    def say_hello(self, now_s: float) -> None:
        job, self.may_push = self.job, False
        for message in () if job.view_message is None else (job.view_message, *job.releases):
            self.send(message)
        body = job.greeting(self)
        if job.view is not None:
            body["open"] = [[push.key, push.message.sequence] for push in self.sent.values()]
        self._greeting = job.next_id()
        self.send(Message(MessageType.RESUME, sequence=self._greeting, body=body))

    @override
    def disconnected(self, now_s: float) -> None:
        super().disconnected(now_s)
        self.may_push, self._requested_bytes = False, 0

    def _receive_resumed(self, message: Message, now_s: float) -> None:
        if message.sequence != self._greeting:
            return  # another greeting has followed
        former, self.epoch, self.resumed = self.epoch, message.epoch, message.body
        self._patience_leases = self._patience_leases if former == self.epoch else 1
        self.requeue([self.sent[key] for key in message.body.get("missing", ()) if key in self.sent])
        self.job.resumed(self, former, now_s)

    # ---- sending -----------------------------------------------------------------------------------------------

    @property
    def _credit_bytes(self) -> int:
        """How much may be on its way to this shard and unanswered."""
        options = self.job.options
        if options.has_decisions:
            return sys.maxsize  # the coordinator decides, and shards answer, once they have all pushes of a step
        servers = len(options.addresses)
        of_server = options.credit_bytes or (CREDIT_BYTES if servers == 1 else CREDIT_BYTES_OF_SEVERAL_SERVERS)
        return of_server * servers // len(self.job.links)

    def _may_send(self, push: Push) -> bool:
        """Whether its chunk has no push under way, and credit is left: the first push always has some."""
        if push.message.key in self.sent:
            return False
        return not self._in_flight_bytes or self._in_flight_bytes + push.size_bytes <= self._credit_bytes

    def pump(self) -> None:
        """Send as many pushes as credit allows."""
        waiting = self.waiting
        while waiting and self.may_push and self._may_send(waiting[0]):
            push = waiting.popleft()
            self.sent[push.message.key] = push
            self._in_flight_bytes += push.size_bytes
            try:
                self.send(push.message)
            except PSEngineError as error:
                self.fail(push, error)
        if self.requests and not waiting:
            self.send_requests()

    def requeue(self, pushes: Iterable[Push]) -> None:
        """These were lost: they are sent again, before all others."""
        for push in reversed(list(pushes)):
            self.drop(push)
            self.waiting.appendleft(push)

    @override
    def send(self, message: Message) -> None:
        if message.type not in _OF_COORDINATOR:
            message.epoch, message.view = self.epoch, self.job.view_number
        super().send(message)

    @override
    def _send_request(self, request: Request) -> None:
        sum_bytes = self._requested_bytes + request.size_bytes
        # What carries nothing waits for no credit: CONFIGURE has to come before the pushes, which have their own.
        if request.is_sent or not self.is_up or 0 < request.size_bytes < sum_bytes > REQUESTED_BYTES:
            return
        lacks_values = self.job.view is not None and (not self.has_chunks or self.job.is_lost(self))
        if request.message.type in _OF_VALUES and lacks_values:
            return
        if request.follows_pushes and (self.waiting or not self.may_push):
            return
        self._requested_bytes = sum_bytes
        super()._send_request(request)

    def _return_credit(self, request: Request) -> None:
        if request.is_sent and request.size_bytes:
            self._requested_bytes -= request.size_bytes
            self.send_requests()

    # ---- time --------------------------------------------------------------------------------------------------

    @override
    def tick(self, now_s: float) -> None:
        super().tick(now_s)
        if self._is_silent(now_s):
            self._patience_leases *= 2  # where it was only slow
            self.open_next(now_s)
        pushes = self.sent.values() if self.may_push else ()
        pulls = (one for one in self.requests.values() if one.is_sent and one.message.type is MessageType.PULL)
        late = next(chain(pushes, pulls), None) if self.is_up else None
        if late is not None and now_s - max(late.submitted_s, late.asked_s) >= self.job.heartbeat_s:
            late.asked_s = now_s
            self.send(Message(MessageType.WAITS, key=late.message.key, sequence=late.message.sequence))

    def _is_silent(self, now_s: float) -> bool:
        """Whether it leaves questions open, and may lead no more: its process may be stopped."""
        asked = [one.submitted_s for one in self.requests.values() if one.is_sent]
        asked += [push.submitted_s for push in self.sent.values() if self.may_push]
        since_s = max(self.active_s, min(asked, default=math.inf)) if self.is_up else self.active_s
        is_late = self.is_connected and now_s - since_s >= self._patience_leases * self.job.lease_s
        return is_late and len(self.addresses) > 1

    # ---- answers -----------------------------------------------------------------------------------------------

    @override
    def receive(self, message: Message, now_s: float) -> None:
        # Repeated answers, and answers that nobody waits for any more, are ignored.
        kind, push = message.type, self.sent.get(message.key)
        if push is not None and push.message.sequence != message.sequence:
            push = None
        if kind is MessageType.UPDATED:
            if push is not None:
                self._receive_updated(push, message)
        elif kind is MessageType.RESUMED:
            self._receive_resumed(message, now_s)
        elif kind is MessageType.PENDING:
            if (late := push or self.requests.get(message.sequence)) is not None:
                late.pending = message.body
        elif kind is MessageType.ERROR:
            self._receive_error(push or self.requests.get(message.sequence), message, now_s)
        elif (request := self.receive_answer(message)) is not None:
            asked = request.message
            # The next gradient is computed from these values, whether they were read or written.
            is_stored = asked.type is MessageType.STORE and message.version > 0
            if (message.type is MessageType.VALUES or is_stored) and not asked.body:
                self.versions[message.key] = message.version
            self._return_credit(request)

    def _receive_updated(self, push: Push, message: Message) -> None:
        job = self.job
        if job.was_taken_back(message):
            return
        self._moved_s = min(self._moved_s, push.submitted_s)
        self.versions[message.key] = message.version
        push.finish(message)
        del self.sent[message.key]
        self._in_flight_bytes -= push.size_bytes
        if push.error is None:
            job.steps.answered(push)
        else:
            job.fail_push(push, push.error)
        if self.waiting:
            self.pump()

    def _receive_error(self, operation: Request | None, message: Message, now_s: float) -> None:
        code, text = message.body["code"], message.body["text"]
        if message.sequence == self._greeting:
            self.retry_at_s = now_s + RETRY_MOST_S
        if code == ErrorCode.NOT_LEADING and operation is None:  # it answers STATUS and ADMIN all the same
            self.retry_at_s = math.inf
            self.resumed = {"shards": [self.address], "chunks": 0, "registration": 0, "view": 0}
            self.greeted(now_s)
        elif code in (ErrorCode.FENCED, ErrorCode.NOT_MEMBER) and self.job.view is not None:
            # The shard has a view without this worker, of which the coordinator will tell.
            if operation is not None and operation.is_sent:
                operation.is_sent = False
                self._requested_bytes -= operation.size_bytes
            self.job.control.beat(now_s)
            # Or an older one, which another's word of an abandoned registration brought: it takes this worker's.
            self.retry_at_s = min(self.retry_at_s, now_s + RETRY_MOST_S)
        elif code == ErrorCode.SHUTTING_DOWN:  # it is asked again on the next connection
            self.last_problem = text
        elif operation is not None:
            self.fail(operation, self.refusal(operation, message))
        elif code in _FATAL or (message.sequence == self._greeting and code in _FATAL_TO_REGISTRAR):
            if code == ErrorCode.OTHER_SERVERS:
                message.body = {"code": code, "text": f"{text} {self.job.named()}"}
            self.job.fail(self.refusal(None, message))
        else:
            self.last_problem = f"it refused a message ({code}): {text}"

    # ---- open operations, endings ------------------------------------------------------------------------------

    @override
    def open_operations(self) -> list[Request]:
        return [*self.requests.values(), *self.sent.values(), *self.waiting]

    def clear(self) -> None:
        """Forget the pushes; they are queued anew."""
        self.sent.clear()
        self.waiting.clear()
        self._in_flight_bytes = 0

    def drop(self, push: Push) -> None:
        """Forget one push."""
        if self.sent.get(push.key) is push:
            del self.sent[push.key]
            self._in_flight_bytes -= push.size_bytes
        elif push in self.waiting:
            self.waiting.remove(push)

    @override
    def fail(self, operation: Request, error: PSEngineError) -> None:
        if isinstance(operation, Push):
            self.job.fail_push(operation, error)
            return
        super().fail(operation, error)
        self._return_credit(operation)

    @override
    def waits_for(self, operation: Request) -> str:
        if operation.pending is None:
            return ""
        ranks, is_log = operation.pending["waiting_for"], operation.pending.get("log")
        here = "its log, whose disk may be full, or its follower" if is_log else "other workers"
        return f"workers {ranks}" if ranks else here
