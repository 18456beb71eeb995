"""A worker's connection to its job's coordinator. Pure; runs on the client's I/O thread.

    connected ── HELLO ── WELCOME ── COMMITs without an answer ── HEARTBEAT, HEARTBEAT, ...
    the coordinator says PREPARE, VIEW, RELEASE, STATE_WANTED and MEET by itself

A coordinator that says nothing for a lease is looked for on a new connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from psengine.parameter_server.client.channel import Channel
from psengine.parameter_server.client.known_server import KnownServer
from psengine.parameter_server.client.operation import Request
from psengine.protocol.messages import HELLO_AGAIN_S, NOBODY, ErrorCode, Message, MessageType

if TYPE_CHECKING:
    from psengine.parameter_server.client.job_client import JobClient

_EXPECTED = -1  # among the requests: WELCOME or VIEW, for which a thread waits


class Control(Channel):
    """See the module's text.

    Attributes:
        epoch: the coordinator's life; 0 none yet.
    """

    def __init__(self, job: JobClient, server: KnownServer) -> None:
        super().__init__(job, server)
        self.epoch = 0
        self._hello = self._heartbeat = 0
        self._next_beat_s = 0.0
        self._waiting_for = ""

    # ---- asking ------------------------------------------------------------------------------------------------

    @override
    def say_hello(self, now_s: float) -> None:
        job, options = self.job, self.job.options
        body: dict[str, Any] = {
            "job": options.job,
            "run": options.run,
            "nonce": job.nonce,
            "host": job.runtime.host().encode("ascii", "replace").decode()[:64],
            "pid": job.runtime.process_id(),
            "rank": options.rank if job.identity.worker == NOBODY else job.identity.worker,
        }
        if options.rule is not None:  # else it reserves a rank
            body |= {"world_size": options.world_size, "rule": options.whole_rule, "continues": options.continues}
        if job.key is not None:
            body["key"] = job.key
        body |= job.hello(now_s)
        self._hello = job.next_id()
        self.send(Message(MessageType.HELLO, sequence=self._hello, body=body))

    @override
    def send(self, message: Message) -> None:
        if message.type not in (MessageType.COMMIT, MessageType.MEET):  # about the view that they were made under
            message.view = self.job.view_number
        super().send(message)

    def commit(self, what: str, **fields: Any) -> Request:
        """Begin a COMMIT; any thread."""
        message = Message(MessageType.COMMIT, view=self.job.view_number, body={"what": what, **fields})
        return self.job.ask(self, message, what=f"COMMIT {what!r} of {self.job}")

    def expect(self, what: str, timeout_s: float, seen: int = 0) -> Request:
        """Begin to wait for news after ``seen`` of them, a WELCOME or a view that has this worker; any thread."""
        job = self.job
        message = Message(MessageType.HELLO, sequence=_EXPECTED, version=seen)
        request = Request(message, job.parking, timeout_s, what=what)
        job.transport.do(job.begin, self, request)
        return request

    def met(self, message: Message) -> None:
        """What was expected has come."""
        if (expected := self.requests.pop(_EXPECTED, None)) is not None:
            expected.finish(message)

    @override
    def _send_request(self, request: Request) -> None:
        if request.message.type is not MessageType.HELLO:
            super()._send_request(request)
        elif request.message.version != self.job.news:  # what it waits for comes by itself, and has come
            self.met(request.message)

    def beat(self, now_s: float) -> None:
        """Send a HEARTBEAT."""
        if not self.is_up:
            return
        job = self.job
        self._next_beat_s = now_s + job.heartbeat_s
        body, self._heartbeat = job.telemetry.to_body() | job.progress(now_s), job.next_id()
        self.send(Message(MessageType.HEARTBEAT, sequence=self._heartbeat, body=body))

    # ---- time --------------------------------------------------------------------------------------------------

    @override
    def tick(self, now_s: float) -> None:
        super().tick(now_s)
        if self.is_connected and now_s - self.active_s >= self.job.lease_s:
            self.open_next(now_s)
        elif now_s >= self._next_beat_s:
            self.beat(now_s)

    # ---- what comes --------------------------------------------------------------------------------------------

    @override
    def receive(self, message: Message, now_s: float) -> None:
        job, kind = self.job, message.type
        if kind is MessageType.WELCOME:
            is_same, self.epoch = message.epoch == self.epoch, message.epoch
            job.welcomed(message, now_s, is_same=is_same)
            self.greeted(now_s)
        elif kind is MessageType.VIEW:
            job.receive_view(message, now_s)
        elif kind is MessageType.RELEASE:
            job.receive_release(message)
        elif kind is MessageType.PREPARE:
            job.prepare(message.view)
        elif kind is MessageType.STATE_WANTED:
            job.receive_state_wanted(message)
        elif kind is MessageType.MEET:
            job.receive_meet(message)
        elif kind is MessageType.ERROR:
            self._receive_error(message, now_s)
        elif kind is MessageType.OK and message.sequence == self._heartbeat:
            ranks, why = message.body.get("waiting_for", []), message.body.get("why", "")
            self._waiting_for = f"workers {ranks} {why}" if ranks else ""
        else:
            self.receive_answer(message)

    def _receive_error(self, message: Message, now_s: float) -> None:
        job, code, request = self.job, message.body["code"], self.requests.get(message.sequence)
        is_lost = code in (ErrorCode.FENCED, ErrorCode.NOT_MEMBER)
        if message.sequence == self._hello and code in (ErrorCode.SHUTTING_DOWN, ErrorCode.NOT_READY):
            self.last_problem = message.body["text"]
            self.retry_at_s = now_s + HELLO_AGAIN_S
        elif message.sequence == self._hello and code == ErrorCode.VIEW_WANTED:
            for shown in () if job.view_message is None else (job.view_message, *job.releases):
                self.send(shown)
            self.say_hello(now_s)
        elif message.sequence == self._hello or code in (
            ErrorCode.STATE_LOST,
            ErrorCode.ENDED,
            ErrorCode.MEMORY,
            ErrorCode.VERSION,
        ):
            job.fail(self.refusal(self.requests.get(_EXPECTED), message))
        elif is_lost and (request is None or request.message.type is not MessageType.LEAVE):
            if request is not None:
                self.fail(request, self.refusal(request, message))
            if self.is_up:  # else it says HELLO already
                self.last_problem = message.body["text"]
                self.greet(now_s)
        elif request is not None:
            self.fail(request, self.refusal(request, message))
        else:
            self.last_problem = f"it refused a message ({code}): {message.body['text']}"

    @override
    def waits_for(self, operation: Request) -> str:
        return self._waiting_for
