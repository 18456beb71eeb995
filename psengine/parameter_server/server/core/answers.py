"""The handler of each message that passed the gate, and the messages that a shard sends. Pure.

A worker's message becomes replies to members of its job, a reader's becomes one message back. Readers (evaluators,
dashboards, ``psengine status``) change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import torch

from psengine.errors import ProtocolError
from psengine.parameter_server.server.core import exchanges
from psengine.parameter_server.server.core.durable_state import DurableState
from psengine.parameter_server.server.interfaces import Outgoing
from psengine.parameter_server.server.core.job import Job
from psengine.parameter_server.server.core.membership import Member
from psengine.parameter_server.server.core.shard_jobs import ShardJobs
from psengine.parameter_server.server.rules.exchange import Reply
from psengine.parameter_server.status_model import ShardStatus, to_json
from psengine.protocol.bodies import MAX_TEXT_CHARS
from psengine.protocol.frames import payload_tensor
from psengine.protocol.messages import ErrorCode, Message, MessageType

# Messages that measure or watch the server are no traffic of a job.
_NOT_OF_THE_JOB = frozenset({MessageType.STATUS_REPORT, MessageType.ECHO, MessageType.ECHOED})
# A report of many workers and chunks takes milliseconds: one that was costly is sent again for ``KEPT_FACTOR`` times as
# long, so that asking all the time takes a tenth of the shard's time.
COSTLY_S = 0.001
KEPT_FACTOR = 10.0


class StatusReport:
    """A shard's status as the bytes of a STATUS_REPORT, which anybody may ask for as often as they like.

    Args:
        describe: the shard's status.
        clock_s: measures how long making a report took, and how old it is.
    """

    def __init__(self, describe: Callable[[], ShardStatus], clock_s: Callable[[], float]) -> None:
        self._describe = describe
        self._clock_s = clock_s
        self._kept: torch.Tensor | None = None
        self._kept_until_s = 0.0

    def payload(self) -> torch.Tensor:
        """The text in UTF-8, as uint8; not to be written to."""
        began_s = self._clock_s()
        if self._kept is not None and began_s < self._kept_until_s:
            return self._kept
        self._kept = torch.frombuffer(bytearray(json.dumps(to_json(self._describe())).encode()), dtype=torch.uint8)
        ended_s = self._clock_s()
        cost_s = ended_s - began_s
        self._kept_until_s = ended_s + (KEPT_FACTOR * cost_s if cost_s > COSTLY_S else 0.0)
        return self._kept


class Answers:
    """One shard's; ``epoch`` is the server process's, ``addresses`` are those of all its shards."""

    def __init__(
        self,
        index: int,
        epoch: int,
        jobs: ShardJobs,
        durable: DurableState,
        report: StatusReport,
        addresses: Callable[[], list[str]],
    ) -> None:
        self._index = index
        self._epoch = epoch
        self._jobs = jobs
        self._durable = durable
        self._report = report
        self._addresses = addresses
        self._of_members: dict[MessageType, Callable[[Job, Member, Message], list[Reply]]] = {
            MessageType.PUSH: lambda job, member, message: exchanges.push(job, member, message, jobs.now_s),
            MessageType.PROBE: exchanges.probe,
            MessageType.REPEAT: exchanges.probe,
            MessageType.RESULT: exchanges.supply_result,
            MessageType.REGISTER: self._register,
            MessageType.SEAL: lambda job, member, message: [ok(member, message), *job.seal(message, member)],
            MessageType.CONFIGURE: self._configure,
            MessageType.PULL: self._pull,
            MessageType.STORE: self._store,
            MessageType.HEARTBEAT: self._heartbeat,
            MessageType.JOIN: lambda job, member, message: job.join(member, message.sequence),
            MessageType.ADMIT: lambda job, member, message: [ok(member, message), *job.admit(message, member)],
            MessageType.LEAVE: lambda job, member, message: job.leave(message, member),
            MessageType.PROGRESS: lambda job, member, message: job.hear_progress(message, member, jobs.now_s),
            MessageType.LIST: lambda job, member, message: [
                _reply(MessageType.CHUNKS, member, message, body=job.chunks.page(message.body["after"]))
            ],
            MessageType.STATUS: lambda job, member, message: [
                _reply(MessageType.STATUS_REPORT, member, message, payload=report.payload())
            ],
            MessageType.ECHO: lambda job, member, message: [
                _reply(MessageType.ECHOED, member, message, payload=payload_tensor(message))
            ],
        }

    def of_member(self, job: Job, member: Member, message: Message) -> list[Reply]:
        """The replies that a member's message leads to; ProtocolError where it is refused: nothing has changed."""
        return self._of_members[message.type](job, member, message)

    def of_reader(self, message: Message) -> Message:
        """The answer to a reader; ProtocolError where the job has no values, or its servers do not hold them."""
        if message.type is MessageType.STATUS:
            return self._message(MessageType.STATUS_REPORT, message, payload=self._report.payload())
        if message.type is MessageType.ECHO:
            return self._message(MessageType.ECHOED, message, payload=payload_tensor(message))
        if message.type is MessageType.BYE:
            return self._message(MessageType.OK, message)
        job = self._jobs.by_number.get(message.job)
        if job is None or not job.is_sealed:
            sealed = sorted(known.name for known in self._jobs.by_number.values() if known.is_sealed)
            raise ProtocolError(
                f"there are no values of the job yet (jobs with values here: {sealed or 'none'}). Name another"
                " (job=, PSENGINE_JOB), or wait for its first worker.",
                ErrorCode.NOT_READY,
            )
        if message.type is MessageType.HEARTBEAT:
            return self._message(MessageType.HEARTBEAT_ACK, message, body=self._heartbeat_body(job))
        if message.type is MessageType.LIST:
            return self._message(MessageType.CHUNKS, message, body=job.chunks.page(message.body["after"]))
        if not job.is_readable:
            raise ProtocolError(
                f"job {job.name!r} averages gradients; its weights are in its workers, not here", ErrorCode.NOT_READY
            )
        version, payload, body = job.chunks.read(message)
        answer = self._message(MessageType.VALUES, message, version=version, payload=payload, body=body)
        job.statistics.bytes_out += traffic_bytes(answer)
        return answer

    def _register(self, job: Job, member: Member, message: Message) -> list[Reply]:
        job.check_registering(member, f"REGISTER of chunk {message.key}")
        job.chunks.register(message)
        job.note_taken(job.chunks.find(message.key), message, 0)
        return [ok(member, message)]

    def _configure(self, job: Job, member: Member, message: Message) -> list[Reply]:
        slots = job.chunks.configure(message)
        job.note_taken(job.chunks.find(message.key), message, 0)
        return [ok(member, message, body={"slots": slots})]

    def _pull(self, job: Job, member: Member, message: Message) -> list[Reply]:
        version, payload, body = job.chunks.read(message)
        if not message.body:
            rule = job.chunks.find(message.key)
            rule.outcome.note_base(member.rank)
            job.note_taken(rule, message, rule.version)
        fields = {"version": version, "payload": payload, "body": body, "key": message.key}
        return [_reply(MessageType.VALUES, member, message, **fields)]

    def _store(self, job: Job, member: Member, message: Message) -> list[Reply]:
        job.store(message)
        if "blob" in message.body:
            return [ok(member, message)]
        rule = job.chunks.find(message.key)
        # The worker computes its next gradient from what it stored.
        version = 0 if message.body else rule.outcome.note_base(member.rank)
        job.note_taken(rule, message, rule.version)
        return [ok(member, message, version=version)]

    def _heartbeat(self, job: Job, member: Member, message: Message) -> list[Reply]:
        member.telemetry.hear(message.body, self._jobs.now_s)
        job.hear_waits(member, message.body.get("waits"))
        return [_reply(MessageType.HEARTBEAT_ACK, member, message, body=self._heartbeat_body(job))]

    def _heartbeat_body(self, job: Job) -> dict[str, Any]:
        durable_version = self._durable.version_of(job.number)
        return {"members": list(job.membership.live_ranks), "durable_version": durable_version}

    # ---- messages ------------------------------------------------------------------------------------------------

    def outgoing(self, job: Job, replies: Iterable[Reply], now_s: float) -> list[Outgoing]:
        """A job's replies as messages; a worker that is fenced by one leaves, which may lead to more."""
        outgoing: list[Outgoing] = []
        for reply in replies:
            member = job.membership.members.get(reply.rank)
            if member is None or not (route := member.route_of(reply.type)):
                continue  # it will ask again when it is back
            if reply.type is MessageType.UPDATED:
                member.telemetry.release(reply.key, reply.sequence, now_s)
            message = self._make(reply, job.number, reply.rank, member.incarnation, reply.key)
            job.statistics.bytes_out += traffic_bytes(message)
            outgoing.append(Outgoing(route, message, reply.pins))
            if reply.type is MessageType.ERROR and reply.body["code"] == ErrorCode.FENCED:
                outgoing.extend(self.outgoing(job, job.fence(member, reply.body["text"], now_s), now_s))
        return outgoing

    def _make(self, reply: Reply, job: int, worker: int, incarnation: int, key: int) -> Message:
        payload = reply.payload
        dtype, numel = (None, 0) if payload is None else (payload.dtype, payload.numel())
        to = job, self._epoch, worker, incarnation, key
        return Message(reply.type, *to, reply.sequence, reply.version, dtype, numel, reply.body, payload)

    def _message(self, type: MessageType, request: Message, **fields: Any) -> Message:
        """An answer to ``request``, to its sender."""
        reply = Reply(type, request.worker, request.sequence, **fields)
        return self._make(reply, request.job, request.worker, request.incarnation, request.key)

    def error(self, request: Message, error: ProtocolError) -> Message:
        """A message was refused."""
        body = {"code": error.code, "text": str(error)[:MAX_TEXT_CHARS]}
        return self._message(MessageType.ERROR, request, body=body)

    def welcome(self, job: Job | None, request: Message, state: str) -> Message:
        """HELLO was accepted; ``state``: see WELCOME."""
        settings = self._jobs.settings
        body = {
            "state": state,
            "shards": self._addresses(),
            "shard_index": self._index,
            "lease_s": settings.lease_s,
            "heartbeat_s": settings.heartbeat_s,
            "credit_bytes": settings.credit_bytes,
            "members": list(job.membership.live_ranks) if job is not None else [],
            "fingerprint": job.fingerprint if job is not None else None,
            "chunks": len(job.chunks) if job is not None else 0,
            "started": job is not None and job.has_started,
            "durable_version": self._durable.version_of(request.job),
            "rule": job.rule.body if job is not None else None,
            "software": settings.software,
            "durability": settings.durability,
        }
        return self._message(MessageType.WELCOME, request, body=body)


def _reply(type: MessageType, member: Member, message: Message, **fields: Any) -> Reply:
    return Reply(type, member.rank, message.sequence, **fields)


def ok(member: Member, message: Message, **fields: Any) -> Reply:
    """The OK to a member's request."""
    return _reply(MessageType.OK, member, message, key=message.key, **fields)


def traffic_bytes(message: Message) -> int:
    """Payload bytes that count as traffic of the job."""
    if message.payload is None or message.dtype is None or message.type in _NOT_OF_THE_JOB:
        return 0
    return message.numel * message.dtype.itemsize
