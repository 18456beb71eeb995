"""PUSH, RESULT, PROBE and REPEAT, handed to the rules of a job's chunks; the time that takes is measured. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from psengine.errors import ProtocolError
from psengine.parameter_server.server.core.job import Job
from psengine.parameter_server.server.core.membership import Member
from psengine.parameter_server.server.rules.chunk_rule import ChunkRule
from psengine.parameter_server.server.rules.chunk_store import absent_ranges
from psengine.parameter_server.server.rules.exchange import Contribution, Reply
from psengine.protocol.layout import ChunkKind
from psengine.protocol.messages import ErrorCode, Message, MessageType


def push(job: Job, member: Member, message: Message, now_s: float) -> list[Reply]:
    """PUSH: hand it to the chunk's rule."""
    rule = job.chunks.find(message.key)
    _check_live(job, member, "yet; it has to JOIN first")
    spec, body = rule.spec, message.body
    if spec.kind not in rule.outcome.pushed_kinds:
        raise ProtocolError(f"{spec.describe()} is a {spec.kind.value}, which is not pushed in this job")
    if message.in_segment and message.payload is None:
        raise ProtocolError(f"{spec.describe()}: worker {member.rank} shares no memory with it", ErrorCode.SEGMENT)
    contribution = Contribution(
        member.rank,
        message.sequence,
        message.version,
        None if message.payload is None else rule.payloads.decode(message),
        body.get("groups"),
        absent_ranges(spec.segments, body["absent"]) if body.get("absent") else (),
        body.get("weight"),
        message.in_segment,
        body.get("held"),
    )
    member.pushes += 1
    repeats, version = job.statistics.duplicates, rule.version
    began_s = job.clocks.measure_s()
    replies = rule.push(contribution)
    if job.statistics.duplicates == repeats:
        member.waits = member.said_waits = None  # it goes on
        job.note_taken(rule, message, version)
    _time_push(job, contribution, rule, replies, job.clocks.measure_s() - began_s, now_s)
    return replies + job.pushed(member.rank)


def _check_live(job: Job, member: Member, fix: str = "") -> None:
    if not member.phase.is_live:
        text = f"worker {member.rank} was not admitted to job {job.name!r} {fix}".rstrip()
        raise ProtocolError(text, ErrorCode.FENCED)


def _time_push(
    job: Job, push: Contribution, rule: ChunkRule, replies: Sequence[Reply], apply_s: float, now_s: float
) -> None:
    """Add the time to that of the worker, or of all whose exchange this push completed."""
    members = job.membership.members
    is_answered = False
    for reply in replies:
        if reply.rank == push.rank and reply.type in (MessageType.UPDATED, MessageType.ERROR):
            is_answered = True
        elif reply.type is MessageType.UPDATED and not rule.is_single and reply.rank in members:
            members[reply.rank].telemetry.apply_s += apply_s
    telemetry = members[push.rank].telemetry
    telemetry.apply_s += apply_s
    if not is_answered and rule.spec.kind is ChunkKind.PARAMETER:
        telemetry.hold(rule.spec.key, push.sequence, now_s)


def supply_result(job: Job, member: Member, message: Message) -> list[Reply]:
    """RESULT: an average that ended before this server started."""
    rule = job.chunks.find(message.key)
    if not member.phase.is_live:
        raise ProtocolError(f"{rule.spec.describe()}: this RESULT was not asked for")
    payload, contributors = rule.payloads.answered(message), message.body.get("contributors")
    return rule.supply_result(member.rank, message.sequence, payload, contributors)


def probe(job: Job, member: Member, message: Message) -> list[Reply]:
    """PROBE: what became of a push? REPEAT: its answer again."""
    _check_live(job, member)
    rule = job.chunks.find(message.key)
    ask = rule.repeat if message.type is MessageType.REPEAT else rule.probe
    version = rule.version
    replies = ask(member.rank, message.sequence)
    # The answer may be one that was held, or one that its worker's next push is compared with.
    job.note_taken(rule, message, version)
    for reply in replies:
        if reply.type in (MessageType.PENDING, MessageType.MISSING, MessageType.SENT):
            reply.body.update(message.body)
        if reply.type is MessageType.PENDING:
            reply.body["arrived_bytes"] = job.statistics.bytes_in
    return replies
