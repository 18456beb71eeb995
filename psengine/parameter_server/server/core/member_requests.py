"""What members of a job ask for beside their exchanges, and the table of who answers which of their messages. Pure."""

from __future__ import annotations

from collections.abc import Callable

from psengine.parameter_server.server.core.answers import Answers
from psengine.parameter_server.server.core.job import Job
from psengine.parameter_server.server.core.membership import Member
from psengine.parameter_server.server.core.shard_jobs import ShardJobs
from psengine.parameter_server.server.core.status_report import StatusReport
from psengine.parameter_server.server.rules.exchange import Reply
from psengine.protocol.frames import payload_tensor
from psengine.protocol.messages import Message, MessageType

Handler = Callable[[Job, Member, Message], list[Reply]]


class MemberRequests:
    """See the module's text.

    Args:
        jobs: of the shard.
        answers: of the shard.
        report: of the shard.
    """

    def __init__(self, jobs: ShardJobs, answers: Answers, report: StatusReport) -> None:
        self._jobs = jobs
        self._answers = answers
        self._report = report
        self._handlers: dict[MessageType, Handler] = {
            MessageType.PUSH: lambda job, member, message: job.exchanges.push(message, member, jobs.now_s),
            MessageType.PROBE: lambda job, member, message: job.exchanges.probe(message, member),
            MessageType.REPEAT: lambda job, member, message: job.exchanges.probe(message, member),
            MessageType.RESULT: lambda job, member, message: job.exchanges.supply_result(message, member),
            MessageType.REGISTER: self._register,
            MessageType.SEAL: lambda job, member, message: [*ok(member, message), *job.seal(message, member)],
            MessageType.CONFIGURE: self._configure,
            MessageType.LIST: self._list,
            MessageType.PULL: self._pull,
            MessageType.STORE: self._store,
            MessageType.HEARTBEAT: self._heartbeat,
            MessageType.JOIN: lambda job, member, message: job.weights.join(member, message.sequence),
            MessageType.ADMIT: self._admit,
            MessageType.STATUS: self._status,
            MessageType.LEAVE: lambda job, member, message: job.weights.leave(message, member),
            MessageType.PROGRESS: lambda job, member, message: job.weights.hear_progress(message, member, jobs.now_s),
            MessageType.ECHO: lambda job, member, message: [
                Reply(MessageType.ECHOED, member.rank, message.sequence, payload=payload_tensor(message))
            ],
        }

    def answer(self, job: Job, member: Member, message: Message) -> list[Reply]:
        """What a member's message leads to, which passed the gate.

        Raises:
            ProtocolError: it is refused; nothing has changed.
        """
        return self._handlers[message.type](job, member, message)

    def _register(self, job: Job, member: Member, message: Message) -> list[Reply]:
        job.check_initialiser(member, f"REGISTER of chunk {message.key}")
        job.chunks.register(message)
        return ok(member, message)

    def _configure(self, job: Job, member: Member, message: Message) -> list[Reply]:
        slots = job.chunks.configure(message)
        return [Reply(MessageType.OK, member.rank, message.sequence, body={"slots": slots})]

    def _admit(self, job: Job, member: Member, message: Message) -> list[Reply]:
        return [*ok(member, message), *job.weights.admit(message, member)]

    def _list(self, job: Job, member: Member, message: Message) -> list[Reply]:
        page = job.chunks.page(message.body["after"])
        return [Reply(MessageType.CHUNKS, member.rank, message.sequence, body=page)]

    def _pull(self, job: Job, member: Member, message: Message) -> list[Reply]:
        type, version, payload, body = job.chunks.read(message)
        if not message.body:
            job.chunks.find(message.key).outcome.note_base(member.rank)
        return [Reply(type, member.rank, message.sequence, version, payload, body, message.key)]

    def _store(self, job: Job, member: Member, message: Message) -> list[Reply]:
        job.chunks.store(message)
        if message.body:
            return ok(member, message)
        # What was stored is what this worker computes its next gradient from.
        version = job.chunks.find(message.key).outcome.note_base(member.rank)
        return [Reply(MessageType.OK, member.rank, message.sequence, version, key=message.key)]

    def _heartbeat(self, job: Job, member: Member, message: Message) -> list[Reply]:
        member.telemetry.hear(message.body, self._jobs.now_s)
        body = self._answers.heartbeat_body(job, message)
        return [Reply(MessageType.HEARTBEAT_ACK, member.rank, message.sequence, body=body)]

    def _status(self, job: Job, member: Member, message: Message) -> list[Reply]:
        return [Reply(MessageType.STATUS_REPORT, member.rank, message.sequence, payload=self._report.payload())]


def ok(member: Member, message: Message) -> list[Reply]:
    """The OK to a member's request."""
    return [Reply(MessageType.OK, member.rank, message.sequence, key=message.key)]
