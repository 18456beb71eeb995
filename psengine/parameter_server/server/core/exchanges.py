"""What workers say of one job's exchanges, handed to the rules of its chunks, and the time that takes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from psengine.errors import ProtocolError
from psengine.parameter_server.server.core.membership import Member
from psengine.parameter_server.server.core.team import Team
from psengine.parameter_server.server.core.weights import Weights
from psengine.parameter_server.server.rules.chunk_rule import ChunkRule
from psengine.parameter_server.server.rules.chunk_store import absent_ranges
from psengine.parameter_server.server.rules.exchange import Contribution, Reply
from psengine.protocol.layout import ChunkKind
from psengine.protocol.messages import ErrorCode, Message, MessageType


class Exchanges:
    """Of one job at one shard.

    Args:
        team: the job's.
        weights: the job's.
        measure_s: measures how long a push takes to apply; see ``Clocks``.
    """

    def __init__(self, team: Team, weights: Weights, measure_s: Callable[[], float]) -> None:
        self._team = team
        self._weights = weights
        self._measure_s = measure_s

    def push(self, message: Message, member: Member, now_s: float) -> list[Reply]:
        """PUSH: hand it to the chunk's rule."""
        rule = self._team.chunks.find(message.key)
        self._check_live(member, "yet; it has to JOIN first")
        spec, body = rule.spec, message.body
        if spec.kind not in rule.outcome.pushed_kinds:
            raise ProtocolError(f"{spec.describe()} is a {spec.kind.value}, which is not pushed in this job")
        push = Contribution(
            member.rank,
            message.sequence,
            message.version,
            None if message.payload is None else rule.payloads.decode(message),
            body.get("groups"),
            absent_ranges(spec.segments, body["absent"]) if body.get("absent") else (),
            body.get("weight"),
        )
        member.pushes += 1
        statistics, last_sequence = self._team.statistics, rule.progress.last_sequence
        refused_before, late_before = sum(statistics.refused.values()), statistics.late
        taken_before = last_sequence.get(push.rank, 0)
        began_s = self._measure_s()
        replies = rule.push(push)
        self._time_push(push, rule, replies, self._measure_s() - began_s, now_s)
        if sum(statistics.refused.values()) != refused_before:
            self._note_refusal(member, rule)
        if statistics.late != late_before:
            member.late += 1
            self._team.record.late(member, push.sequence)
        if rule.is_single and taken_before < push.sequence == rule.progress.last_sequence.get(push.rank):
            self._team.cuts.pushed(push, spec.key, body.get("step"))
        return replies + self._weights.pushed(member.rank)

    def _check_live(self, member: Member, fix: str = "") -> None:
        if not member.phase.is_live:
            text = f"worker {member.rank} was not admitted to job {self._team.name!r} {fix}".rstrip()
            raise ProtocolError(text, ErrorCode.FENCED)

    def _note_refusal(self, member: Member, rule: ChunkRule) -> None:
        reason = self._team.statistics.last_refusal
        if reason != "abstained":  # it only asked for weights
            member.refused += 1
            self._team.record.refused(member, rule.spec.describe(), reason)

    def _time_push(
        self, push: Contribution, rule: ChunkRule, replies: Sequence[Reply], apply_s: float, now_s: float
    ) -> None:
        """Whose time it was: that of the worker, or of all whose exchange this push completed."""
        members = self._team.membership.members
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

    def supply_result(self, message: Message, member: Member) -> list[Reply]:
        """RESULT: an average that ended before this server started."""
        rule = self._team.chunks.find(message.key)
        if not member.phase.is_live:
            raise ProtocolError(f"{rule.spec.describe()}: this RESULT was not asked for")
        payload, contributors = rule.payloads.answered(message), message.body.get("contributors")
        return rule.supply_result(member.rank, message.sequence, payload, contributors)

    def probe(self, message: Message, member: Member) -> list[Reply]:
        """PROBE: what became of a push? REPEAT: its answer again."""
        self._check_live(member)
        gathering = self._team.chunks.find(message.key)
        repeats = message.type is MessageType.REPEAT
        replies = (gathering.repeat if repeats else gathering.probe)(member.rank, message.sequence)
        for reply in replies:
            if reply.type in (MessageType.PENDING, MessageType.MISSING, MessageType.SENT):
                reply.body.update(message.body)
            if reply.type is MessageType.PENDING:
                reply.body["arrived_bytes"] = self._team.statistics.bytes_in
        return replies
