"""One job at one shard: its workers, its chunks, and when it begins.

unsealed ──rank 0 registers, seals──► sealed ──first exchange ends──► started
   ▲                                                                     │
   └──────── averaging: every worker is gone and new ones come ──────────┘
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from psengine.errors import ProtocolError
from psengine.parameter_server.server.core.admission import Admissions
from psengine.parameter_server.server.core.capture import Cuts
from psengine.parameter_server.server.core.clocks import Clocks
from psengine.parameter_server.server.core.job_record import JobRecord
from psengine.parameter_server.server.core.leaving import Leaving
from psengine.parameter_server.server.core.losses import Losses
from psengine.parameter_server.server.core.membership import MAX_WORKERS, Greeting, Member, Membership
from psengine.parameter_server.server.rules.chunk_rule import ChunkRule
from psengine.parameter_server.server.rules.chunk_store import ChunkStore, absent_ranges
from psengine.parameter_server.server.rules.exchange import Contribution, Reply, RuleContext
from psengine.parameter_server.server.rules.received import received_values
from psengine.parameter_server.server.rules.registry import JobRule
from psengine.parameter_server.server.rules.statistics import JobStatistics
from psengine.parameter_server.status_model import Departed
from psengine.protocol.layout import ChunkKind, job_number
from psengine.protocol.messages import RECOVERY_VERSION, ErrorCode, Message, MessageType
from psengine.tracing.logging_format import RateLimit

logger = logging.getLogger(__name__)

# Of workers that are out: a whole host's fit in.
LINES_INTERVAL_S = 10.0
MAX_LINES = 128


class Job:
    """The workers and chunks of one job at one shard.

    Args:
        name: as in HELLO.
        rule: as in HELLO: "average" with a quorum, or "apply" with its options.
        lease_s: silence after which a worker is evicted.
        clocks: see there.
        take_memory: see ``ChunkStore``.
        note: told of what happens to workers, for people: see ``EventLog.note``.
        begun_by: the peer whose HELLO was the first, see ``Sender``; "" where that is not known.
    """

    def __init__(
        self,
        name: str,
        rule: Mapping[str, Any],
        lease_s: float,
        clocks: Clocks,
        take_memory: Any,
        note: Callable[..., None] | None = None,
        begun_by: str = "",
    ) -> None:
        self.name = name
        self.begun_by = begun_by
        self.number = job_number(name)
        self.rule = JobRule(rule)
        self.is_sealed = False
        self.expected_workers = 1
        self._came: set[int] = set()
        self.fingerprint = 0
        # Whether it had started before this server did, or since it began anew; and the exchanges of before.
        self._has_started = False
        self._ended_before = 0
        # The server may know less of the job than its workers do: when it heard of that, and what was averaged then.
        self._is_restored = False
        self._began_anew = False
        self._resumed: tuple[float, int] | None = None
        self._measure_s = clocks.measure_s
        self._lines = RateLimit(LINES_INTERVAL_S, MAX_LINES)
        self.statistics = JobStatistics()
        self.membership = Membership(lease_s, lambda: int(clocks.wall_s() * 1000))
        self._losses = Losses()
        self._leaving = Leaving()
        self.cuts = Cuts()
        self._record = JobRecord(name, note, clocks.wall_s)
        context = RuleContext(
            live_ranks=lambda: self.membership.live_ranks, missing_ranks=self.missing_ranks, statistics=self.statistics
        )
        self.chunks = ChunkStore(self.rule, context, take_memory)
        self._admissions = Admissions(one_at_a_time=self.rule.body.get("quorum") is not None)

    @property
    def has_started(self) -> bool:
        """Whether an exchange has ended, here or before this server started."""
        return self._has_started or self._ended() > self._ended_before

    def _ended(self) -> int:
        """Grows with every exchange that ends."""
        return self.statistics.averaged + self.statistics.applied

    def missing_ranks(self) -> tuple[int, ...]:
        """Expected workers that are not here, or never were, as the rule's gathering has it."""
        awaited = self.rule.kind.gathering.awaited
        here = awaited(self.membership.live_ranks, self._came, has_started=self.has_started)
        if here is None or len(here) >= self.expected_workers:
            return ()
        return tuple(rank for rank in range(self.expected_workers) if rank not in here)

    @property
    def initialiser(self) -> int:
        """The rank that registers the chunks: 0, or the lowest that is left of a job that is under way."""
        live = self.membership.live_ranks
        return live[0] if self._resumed is not None and live else 0

    # ---- coming and going --------------------------------------------------------------------------------------

    def greet(
        self, message: Message, user_id: str, route: bytes, now_s: float
    ) -> tuple[str, Member | None, list[Reply]]:
        """HELLO of a worker: (state of WELCOME, the member, answers that may leave now).

        Raises:
            ProtocolError: the rank is taken, or belongs to another key, or is out of bounds.
        """
        body = message.body
        rank, members = body.get("rank"), body.get("members") or []
        holder = self.membership.members.get(rank) if rank is not None else None
        largest = max(rank or 0, body["world_size"] - 1, *members, 0)
        if largest >= MAX_WORKERS:
            raise ProtocolError(
                f"a job has at most {MAX_WORKERS} workers (expected ranks below that, got {largest})",
                ErrorCode.BAD_VALUE,
            )
        if members and not self.rule.holds_weights:
            self._resume(members, now_s)
        elif self._is_restored:
            self._losses.expect(members)
        greeting = self.membership.greet(
            rank=rank,
            nonce=body["nonce"],
            incarnation=message.incarnation,
            user_id=user_id,
            route=route,
            host=body["host"],
            pid=body["pid"],
            progress=self.statistics.averaged,
            now_s=now_s,
            knows_members=rank in members,
        )
        if greeting.verdict == "wait":
            return "wait", None, []
        if greeting.member is None:
            raise self._rank_taken(rank, greeting)
        greeting.member.protocol_version = message.peer_version
        if not self.has_started:
            self.expected_workers = max(self.expected_workers, body["world_size"])
        replies = []
        if greeting.replaced_live:
            if holder is not None:
                self._departed(holder, "fenced", f"a new process has its rank, {body['pid']} on {body['host']}")
            self._admissions.forget(greeting.member.rank)
            replies = self._left(greeting.member.rank)
        state, member, more = self._place(greeting, greeting.member, now_s)
        return state, member, [*replies, *more]

    def _resume(self, members: list[int], now_s: float) -> None:
        """A worker of a job that is under way: if this server is new to it, wait one lease for all who were in it.

        Workers' lists may differ by who came last; those named once an exchange has ended have missed it, and join.
        """
        if self._resumed is None:
            if self._began_anew or (self.is_sealed and not self._is_restored):
                return
            logger.warning("job %r is under way already; waiting for its workers %s", self.name, sorted(members))
            self._has_started = True
            self._resumed = (now_s, self.statistics.averaged)
        since_s, averaged = self._resumed
        if now_s - since_s <= self.membership.lease_s and self.statistics.averaged == averaged:
            self.membership.expect(members, now_s)

    def tick(self, now_s: float) -> list[int]:
        """Some time has passed; ranks whose lease ran out."""
        self.count_losses(now_s)
        return self.membership.expired(now_s)

    def stood_still(self, pause_s: float) -> None:
        """See ``Membership.stood_still``."""
        self.membership.stood_still(pause_s)
        self._losses.stood_still(pause_s)
        if self._resumed is not None:
            since_s, averaged = self._resumed
            self._resumed = since_s + pause_s, averaged

    def _rank_taken(self, rank: int | None, greeting: Greeting) -> ProtocolError:
        holder = self.membership.members.get(rank if rank is not None else -1)
        where = f"process {holder.pid} on {holder.host}" if holder is not None else "another process"
        if greeting.verdict == "denied":
            return ProtocolError(f"rank {rank} of job {self.name!r} belongs to another key", ErrorCode.DUPLICATE_RANK)
        return ProtocolError(
            f"rank {rank} of job {self.name!r} is held by {where}, which is alive. Every worker needs a rank of its"
            " own: check RANK, or give this run a job of its own (PSENGINE_JOB).",
            ErrorCode.DUPLICATE_RANK,
        )

    def _place(self, greeting: Greeting, member: Member, now_s: float) -> tuple[str, Member, list[Reply]]:
        if not self.is_sealed:
            return ("initialise" if member.rank == self.initialiser else "wait"), member, []
        if member.is_live:
            return "ready", member, []
        if not self.rule.holds_weights and not self.has_started and member.is_survivor:
            return self._go_on_from(member)
        if self.rule.holds_weights or not self.has_started or (greeting.missed_nothing and member.was_live):
            return "ready", member, self._admit(member)
        if self.membership.live_ranks:
            self._admissions.forget(member.rank)
            return "join", member, []
        if member.was_live:
            if greeting.progress >= 0 and all(rule.can_catch_up(member.rank) for rule in self.chunks.rules.values()):
                return "ready", member, self._admit(member)
            if self.membership.may_others_be_ahead(member.rank, greeting.progress, now_s):
                return "wait", member, []
            return self._go_on_from(member)
        if self.membership.has_survivor(member.rank, now_s):
            return "wait", member, []  # it has the state that this one lacks
        return self._begin_anew(member)

    def _go_on_from(self, member: Member) -> tuple[str, Member, list[Reply]]:
        """It alone has state; others, if any, are of a life of the job in which nothing happened yet."""
        logger.warning("job %r goes on from worker %d, the only one left", self.name, member.rank)
        text = f"job {self.name!r} goes on from worker {member.rank}, which returned with its state"
        fenced = {"code": ErrorCode.FENCED, "text": text}
        replies = [Reply(MessageType.ERROR, rank, 0, body=fenced) for rank in self.membership.live_ranks]
        self._has_started = True
        self.membership.lose_track()
        for rule in self.chunks.rules.values():
            rule.reset()
        return "ready", member, [*replies, *self._admit(member)]

    def _begin_anew(self, member: Member) -> tuple[str, Member, list[Reply]]:
        """Nobody is left who knows where an averaging job stood."""
        logger.warning("job %r begins anew: all its workers are gone", self.name)
        self.is_sealed = self._has_started = self._is_restored = False
        self._ended_before = self._ended()
        self._resumed = None
        self._came.clear()
        self._began_anew = True
        self.membership.begin_anew()
        self.chunks.clear()
        return ("initialise" if member.rank == self.initialiser else "wait"), member, []

    def _admit(self, member: Member) -> list[Reply]:
        is_new_process = not member.was_live
        self._came.add(member.rank)
        self.membership.admit(member.rank)
        self._record.joined(member)
        return [
            reply
            for rule in self.chunks.rules.values()
            for reply in rule.gathering.worker_came(member.rank, is_new_process=is_new_process)
        ]

    def check_initialiser(self, member: Member, what: str) -> None:
        """Raise ProtocolError unless this worker may register chunks and seal them now."""
        if self.is_sealed or member.rank != self.initialiser:
            raise ProtocolError(
                f"{what}: job {self.name!r} takes chunks from worker {self.initialiser} before it is sealed (got worker"
                f" {member.rank}, {'sealed' if self.is_sealed else 'not sealed'})"
            )

    def seal(self, message: Message, member: Member) -> list[Reply]:
        """SEAL: all chunks of this shard are here."""
        chunks, fingerprint = message.body["chunks"], message.body["fingerprint"]
        if self.is_sealed and (chunks, fingerprint) == (len(self.chunks), self.fingerprint):
            return []  # the OK was lost
        self.check_initialiser(member, "SEAL")
        if chunks != len(self.chunks):
            raise ProtocolError(
                f"job {self.name!r} is sealed with all its chunks (expected {len(self.chunks)}, got {chunks})"
            )
        self.fingerprint = fingerprint
        self.is_sealed = True
        if not self.rule.holds_weights and member.is_survivor:
            self._has_started = True  # it goes on where it was; who comes now has to join
        return [] if member.is_live else self._admit(member)

    def join(self, member: Member, request: int) -> list[Reply]:
        """JOIN: a worker that comes late wants the state of one that was there; OK is held until it is admitted."""
        self._check_averages("JOIN")
        rank = member.rank
        if self._admissions.is_admitted(rank, member.incarnation, request):
            return [Reply(MessageType.OK, rank, request)]
        if not self.has_started and not member.is_live:
            raise ProtocolError(f"job {self.name!r} has begun anew; say HELLO again", ErrorCode.NOT_MEMBER)
        others = [other for other in self.membership.live_ranks if other != rank]
        if not others:
            raise ProtocolError(f"job {self.name!r} has no live worker with state to give", ErrorCode.NOT_MEMBER)
        donor = self._admissions.join(rank, request, others)
        replies: list[Reply] = []
        if member.is_live:
            self._has_started = True  # another shard says so, where this worker missed something
            self.membership.demote(rank)
            replies = self._left(rank)
        if donor is not None:
            wanted = {"rank": rank, "incarnation": member.incarnation}
            replies.append(Reply(MessageType.STATE_WANTED, donor, 0, body=wanted))
        return replies

    def admit(self, message: Message, donor: Member) -> list[Reply]:
        """ADMIT: the donor has deposited its state; the joiner takes part from the donor's next exchange on."""
        self._check_averages("ADMIT")
        if not donor.is_live:
            raise ProtocolError(f"worker {donor.rank} is not live and has no state to give", ErrorCode.FENCED)
        rank = message.body["rank"]
        joiner = self.membership.members.get(rank)
        if joiner is None or joiner.incarnation != message.body["incarnation"]:
            return []  # gone meanwhile
        if not self._admissions.admit(rank, joiner.incarnation, (donor.rank, message.sequence)):
            return []  # its OK was lost
        was_live = joiner.is_live
        self.membership.admit(rank)
        if not was_live:
            self._record.joined(joiner, donor.rank)
        for rule in self.chunks.rules.values():
            rule.progress.continue_from(rank, donor.rank, was_live=was_live)
        request = self._admissions.answer(rank)
        return [] if request is None else [Reply(MessageType.OK, rank, request)]

    def leave(self, message: Message, member: Member) -> list[Reply]:
        """LEAVE: OK is held until every live worker has the averages that this one has."""
        self._check_averages("LEAVE")
        self._leaving.ask(member.rank, message.sequence)
        questions = self._leaving.questions(member.rank, self.chunks.rules.values(), self.membership.members)
        return questions or self._let_leave()

    def _let_leave(self) -> list[Reply]:
        return self._leaving.release(self.chunks.rules.values(), self.membership.live_ranks) if self._leaving else []

    def _check_averages(self, what: str) -> None:
        if self.rule.holds_weights:
            raise ProtocolError(f"{what} is for averaging jobs (job {self.name!r} is none)")
        if not self.is_sealed:
            raise ProtocolError(f"job {self.name!r} has begun anew; say HELLO again", ErrorCode.NOT_MEMBER)

    def remove(
        self,
        rank: int,
        now_s: float,
        *,
        forget: bool = False,
        must_join: bool = False,
        why: str = "the others are further on",
    ) -> list[Reply]:
        """A worker left (``forget``), or is not as far as it should be; answers that may leave now.

        ``must_join``: it lacks what nobody can tell it any more (``why``), even if the job does nothing until it
        returns.
        """
        member = self.membership.members.get(rank)
        if member is not None and forget:
            self._departed(member, "left", "it said goodbye")
        elif member is not None:
            self.statistics.evicted += 1
            self._warn_out(rank, f"it lacks what nobody can give it any more ({why})", now_s)
            self._departed(member, "fenced", "the others are further on")
        self._admissions.forget(rank)
        self.membership.remove(rank, progress=-1 if must_join else self.statistics.averaged, now_s=now_s, forget=forget)
        return self._left(rank)

    def evict(self, ranks: Sequence[int], now_s: float) -> list[Reply]:
        """Workers whose leases ran out together; answers that may leave now.

        All are out before an exchange ends for want of them: else those evicted last would not seem to have missed it.
        """
        averaged = self.statistics.averaged
        for rank in ranks:
            member = self.membership.members[rank]
            self.statistics.evicted += 1
            silent_s = now_s - member.last_heard_s
            why = "its lease was ended by hand"
            if silent_s > self.membership.lease_s:
                why = f"silent for {silent_s:.1f} s, longer than its lease"
            self._warn_out(rank, why, now_s)
            self._departed(member, "evicted", why)
            self._admissions.forget(rank)
            self.membership.remove(rank, progress=averaged, now_s=now_s)
        return [reply for rank in ranks for reply in self._left(rank)]

    def _warn_out(self, rank: int, why: str, now_s: float) -> None:
        member = self.membership.members.get(rank)
        # Whoever reaches the server can come and go: a line for each would fill the disk.
        suppressed = None if member is None else self._lines.allows(now_s)
        if member is None or suppressed is None:
            return
        logger.warning(
            "job %r: worker %d (process %d on %s) is out: %s; the others go on without it%s",
            self.name,
            rank,
            member.pid,
            member.host,
            why,
            f" ({suppressed} more unmentioned)" if suppressed else "",
        )

    def _departed(self, member: Member, reason: str, why: str) -> None:
        """Tell of a worker that goes, before it is forgotten."""
        steps = self.steps()
        step = steps.get(member.rank, 0) if steps else member.telemetry.times.steps or 0
        self._record.departed(member, reason, why, step)
        self.statistics.recent_staleness.pop(member.rank, None)

    def steps(self) -> dict[int, int]:
        """Per worker the step it is in, by the first chunk that is trained; {} where this shard has none."""
        trained = (rule for rule in self.chunks.rules.values() if rule.is_trained)
        return next((rule.gathering.clocks() for rule in trained), {})

    def _left(self, rank: int) -> list[Reply]:
        """Exchanges do not wait for this worker any more, or not for the process that had its rank.

        Nor for joiners that it was letting in: perhaps it did so at this shard alone, and then they wait elsewhere for
        another donor, who can give no state before this exchange has ended.
        """
        replies = []
        for joiner in self._admissions.unread_from(rank):
            self._admissions.forget(joiner)
            if joiner in self.membership.live_ranks:
                self.membership.demote(joiner)
                replies += self._left(joiner)
        self._leaving.forget(rank)
        self.cuts.left(rank)
        replies += [reply for rule in self.chunks.rules.values() for reply in rule.gathering.worker_left(rank)]
        return replies + self._let_leave()

    # ---- exchanges ---------------------------------------------------------------------------------------------

    def push(self, message: Message, member: Member, now_s: float) -> list[Reply]:
        """PUSH: hand it to the chunk's rule."""
        rule = self.chunks.find(message.key)
        if not member.is_live:
            raise ProtocolError(
                f"worker {member.rank} was not admitted to job {self.name!r} yet; it has to JOIN first",
                ErrorCode.FENCED,
            )
        spec = rule.spec
        if spec.kind not in rule.outcome.pushed_kinds:
            raise ProtocolError(f"{spec.describe()} is a {spec.kind.value}, which is not pushed in this job")
        values = None if message.payload is None else received_values(message, spec)
        body = message.body
        push = Contribution(
            member.rank,
            message.sequence,
            message.version,
            values,
            body.get("groups"),
            absent_ranges(spec.segments, body["absent"]) if body.get("absent") else (),
            body.get("weight"),
        )
        member.pushes += 1
        refused_before = sum(self.statistics.refused.values())
        late_before = self.statistics.late
        taken_before = rule.progress.last_sequence.get(push.rank, 0)
        began_s = self._measure_s()
        replies = rule.push(push)
        self._time_push(push, rule, replies, self._measure_s() - began_s, now_s)
        if sum(self.statistics.refused.values()) != refused_before:
            self._note_refusal(member, rule)
        if self.statistics.late != late_before:
            member.late += 1
            self._record.late(member, push.sequence)
        if rule.gathering.is_single and taken_before < push.sequence == rule.progress.last_sequence.get(push.rank):
            self.cuts.pushed(push, spec.key, body.get("step"))
        self._admissions.pushed(member.rank)
        return replies + self._let_leave()

    def _note_refusal(self, member: Member, rule: ChunkRule) -> None:
        reason = self.statistics.last_refusal
        if reason != "abstained":  # it only asked for weights
            member.refused += 1
            self._record.refused(member, rule.spec.describe(), reason)

    def _time_push(
        self, push: Contribution, rule: ChunkRule, replies: Sequence[Reply], apply_s: float, now_s: float
    ) -> None:
        """Whose time it was: that of the worker, or of all whose average this push completed."""
        members = self.membership.members
        is_answered = False
        for reply in replies:
            if reply.rank == push.rank and reply.type in (MessageType.UPDATED, MessageType.ERROR):
                is_answered = True
            elif reply.type is MessageType.UPDATED and not rule.gathering.is_single and reply.rank in members:
                members[reply.rank].telemetry.apply_s += apply_s
        telemetry = members[push.rank].telemetry
        telemetry.apply_s += apply_s
        if not is_answered and rule.spec.kind is ChunkKind.PARAMETER:
            telemetry.hold(rule.spec.key, push.sequence, now_s)

    def supply_result(self, message: Message, member: Member) -> list[Reply]:
        """RESULT: an average that ended before this server started."""
        rule = self.chunks.find(message.key)
        if not member.is_live:
            raise ProtocolError(f"{rule.spec.describe()}: this RESULT was not asked for")
        values = received_values(message, rule.spec)
        contributors = message.body.get("contributors")
        return rule.gathering.supply_result(member.rank, message.sequence, values, contributors)

    def probe(self, message: Message, member: Member) -> list[Reply]:
        """PROBE: what became of a push? REPEAT (and PROBE of protocol version 2): its answer again."""
        if not member.is_live:
            raise ProtocolError(f"worker {member.rank} was not admitted to job {self.name!r}", ErrorCode.FENCED)
        rule = self.chunks.find(message.key)
        repeats = message.type is MessageType.REPEAT or message.peer_version < RECOVERY_VERSION
        replies = (rule.gathering.repeat if repeats else rule.gathering.probe)(member.rank, message.sequence)
        for reply in replies:
            if reply.type in (MessageType.PENDING, MessageType.MISSING, MessageType.SENT):
                reply.body.update(message.body)
            if reply.type is MessageType.PENDING:
                reply.body["arrived_bytes"] = self.statistics.bytes_in
        return replies

    # ---- after a restart ---------------------------------------------------------------------------------------

    def hear_progress(self, message: Message, member: Member, now_s: float) -> list[Reply]:
        """PROGRESS: a worker says how far it was with a server that lived before this one."""
        lost, replies = [0, 0, 0], list[Reply]()
        for key, version, sequence, under_way, *unused in message.body["chunks"]:
            rule = self.chunks.find(key)
            if rule.outcome.holds_weights:
                restored = rule.gathering.restored(member.rank)
                updates, own = self._losses.report(member.rank, key, restored, (version, sequence), under_way, unused)
                lost = [lost[0] + updates, lost[1] + own, lost[2] + (updates > 0)]
            elif member.is_live:
                replies += rule.gathering.note_answered(member.rank, sequence)
        if not message.body["more"]:
            self._losses.spoke(member.rank, now_s)
            self.count_losses(now_s)
        ok = Reply(MessageType.OK, member.rank, message.sequence, body={"lost": lost})
        return [ok, *replies, *self._let_leave()]

    def count_losses(self, now_s: float) -> None:
        """Where it is time, say what was lost when this server went back to a snapshot."""
        updates, chunks = self._losses.count(self.membership.members, self.membership.lease_s, now_s)
        if updates:
            self.statistics.lost_updates += updates
            self._record.lost(updates, chunks)

    # ---- for snapshots and status ------------------------------------------------------------------------------

    def to_meta(self) -> dict[str, Any]:
        """What a snapshot keeps of the job itself."""
        return {
            "rule": self.rule.body,
            "expected_workers": self.expected_workers,
            "has_started": self.has_started,
            "came": sorted(self._came),
            "fingerprint": self.fingerprint,
            **self.membership.to_meta(),
        }

    def restore_meta(self, meta: dict[str, Any], now_s: float) -> None:
        """Take over a snapshot's; its workers get a fresh lease."""
        self.expected_workers = meta["expected_workers"]
        self._came = set(meta["came"])
        self._has_started = meta["has_started"]
        self.fingerprint = meta["fingerprint"]
        self.membership.restore(meta, now_s)
        self._losses.expect(self.membership.live_ranks)
        self.is_sealed = self._is_restored = True

    def hear(self, body: Mapping[str, Any], member: Member, now_s: float) -> None:
        """HEARTBEAT, and what the worker says of itself."""
        member.telemetry.hear(body, now_s)

    def departed(self) -> tuple[Departed, ...]:
        """Workers that are gone, the latest last."""
        return self._record.to_status()
