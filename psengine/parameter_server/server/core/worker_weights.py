"""A job whose weights are in its workers: a joiner needs another's state; who leaves takes its own along. Pure.

Each worker that wants to leave may go once everybody else has the averages that it has:

    leaver   PROGRESS ─ LEAVE ─────────────────────────────────► OK ─ BYE
    shard                   └ PROGRESS_WANTED ─► other       ┌───┘
    other                                          PROGRESS ─┘

Until then the leaver can give an average again to a server that dies and comes back without it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from typing_extensions import override

from psengine.errors import ProtocolError
from psengine.parameter_server.server.core.admission import Admissions
from psengine.parameter_server.server.core.job import Job
from psengine.parameter_server.server.core.membership import Greeting, Member
from psengine.parameter_server.server.core.states import JOB, JobEvent, JobPhase, MemberEvent, MemberPhase
from psengine.parameter_server.server.rules.chunk_rule import ChunkRule
from psengine.parameter_server.server.rules.exchange import Reply
from psengine.protocol.messages import ErrorCode, Message, MessageType

logger = logging.getLogger(__name__)


class AveragingJob(Job):
    """See the module's text."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._admissions = Admissions(one_at_a_time=self.rule.body.get("quorum") is not None)
        # Newcomers that were let in and have not pushed yet.
        self._without_state: set[int] = set()
        # Workers that want to leave, by rank the id of the request.
        self._leaving: dict[int, int] = {}
        # When a worker said that the job is under way, which this server did not know.
        self._told_s = 0.0

    @property
    @override
    def initialiser(self) -> int:
        """0, or the lowest that has state of a job that was under way; one whose lease ran out if no other is."""
        if self.phase not in (JobPhase.REBUILDING, JobPhase.ORPHANED):
            return 0
        members = self.membership.members
        survivors = (rank for rank, member in members.items() if member.phase.was_live)
        return min(self.membership.live_ranks or survivors, default=0)

    # ---- coming ------------------------------------------------------------------------------------------------

    @override
    def told(self, members: Collection[int], now_s: float) -> None:
        """If this server is new to the job, wait one lease for all who were in it.

        Workers' lists may differ by who came last; those named once an exchange has ended have missed it, and join.
        """
        if members and JobEvent.TOLD in JOB[self.phase]:
            logger.warning("job %r is under way already; waiting for its workers %s", self.name, sorted(members))
            self.advance(JobEvent.TOLD)
            self._told_s = now_s
        waits = self.phase in (JobPhase.REBUILDING, JobPhase.RESUMING)
        if members and waits and now_s - self._told_s <= self.membership.lease_s:
            self.membership.expect(members, now_s)

    @override
    def greet(
        self, message: Message, user_id: str, route: bytes, now_s: float
    ) -> tuple[str, Member | None, list[Reply]]:
        """A worker that was let in here, and says HELLO once more before it has the state, has to join anew.

        Another shard may not have let it in. Its donor, which that shard waits for, waits for it here.
        """
        body, replies = message.body, list[Reply]()
        rank = -1 if body.get("rank") is None else body["rank"]
        has_state = rank in (body.get("members") or ())
        if self._admissions.is_reading(rank) and not has_state and self.membership.is_said_anew(message, user_id):
            replies = self._demote(rank)
            self._admissions.forget(rank)
        state, member, more = super().greet(message, user_id, route, now_s)
        replies += more
        is_orphaned = self.phase is JobPhase.ORPHANED
        had_state = has_state or body.get("version") is not None
        if member is not None and had_state and is_orphaned and member.phase is MemberPhase.NEWCOMER:
            member.advance(MemberEvent.KNEW_OTHERS)  # processes that were live after it are gone
        if member is not None and self.is_sealed and self.has_started and state in ("wait", "join"):
            state, more = self._follow(body.get("lead"), state, member)
            replies += more
        return state, member, replies

    def _follow(self, lead: str | None, state: str, member: Member) -> tuple[str, list[Reply]]:
        """The lead has decided whose values the job goes on with; else shards might wait for different workers.

        Connections to shards fail one by one, so that each shard may have put out another worker.
        """
        if lead == "alone":
            return self._go_on_from(member)
        others = [other for rank, other in self.membership.members.items() if rank != member.rank]
        if lead != "initialise" or any(other.phase is MemberPhase.LIVE for other in others):
            return state, []
        self.membership.forget_expected()
        return self._begin_anew(member), []

    def _demote(self, rank: int) -> list[Reply]:
        if rank not in self.membership.live_ranks:
            return []
        self.membership.demote(rank)
        return self._leave_exchanges(rank)

    @override
    def _place(self, greeting: Greeting, member: Member, now_s: float) -> tuple[str, list[Reply]]:
        rank, membership = member.rank, self.membership
        if rank in self._without_state and not greeting.knows_members:
            # Its donor died before every shard had let it in: it has read nothing, and is no source of state.
            member.advance(MemberEvent.CAME)
        if not self.has_started and member.phase is MemberPhase.SURVIVOR:
            return self._go_on_from(member)
        if not self.has_started or (greeting.missed_nothing and member.phase.was_live):
            return "ready", self.let_in(member)
        if membership.live_ranks:
            self._admissions.forget(rank)
            return "join", []
        if member.phase.was_live:
            reached = member.version or 0
            if greeting.progress >= 0 and all(rule.can_catch_up(rank, reached) for rule in self.rules):
                return "ready", self.let_in(member)
            if membership.may_others_be_ahead(rank, greeting.progress, now_s):
                return "wait", []
            return self._go_on_from(member)
        if membership.has_survivor(rank, now_s):
            return "wait", []  # the survivor has the state that this one lacks
        return self._begin_anew(member), []

    def _begin_anew(self, member: Member) -> str:
        """Values are to be brought again; what this worker, which is here, has to do."""
        logger.warning("job %r begins anew: all its workers are gone", self.name)
        self.advance(JobEvent.ORPHANED)
        self.came.clear()
        self.membership.begin_anew()
        self.chunks.clear()
        return "initialise" if member.rank == self.initialiser else "wait"

    def _go_on_from(self, member: Member) -> tuple[str, list[Reply]]:
        """It alone has state; others, if any, are of a life of the job in which nothing happened yet.

        Raises:
            ProtocolError: its state is older than one that is known to have been, by what was on the disk.
        """
        if member.version is not None and member.version < self.restored_version:
            raise ProtocolError(
                f"job {self.name!r} had come further than the only worker that is left, when this server started"
                f" (expected weights of exchange {self.restored_version} or later, got worker {member.rank} with those"
                f" of {member.version}). Fix: bring back a worker that is further; or start all anew from a checkpoint,"
                f" after psengine admin forget --job {self.name}.",
                ErrorCode.STATE_LOST,
            )
        logger.warning("job %r goes on from worker %d, the only one left", self.name, member.rank)
        text = f"job {self.name!r} goes on from worker {member.rank}, which returned with its state"
        fenced = {"code": ErrorCode.FENCED, "text": text}
        replies = [Reply(MessageType.ERROR, rank, 0, body=fenced) for rank in self.membership.live_ranks]
        self._start()
        self.membership.lose_track()
        for rule in self.rules:
            rule.reset()
        return "ready", [*replies, *self.let_in(member)]

    def _start(self) -> None:
        """An exchange has ended elsewhere, which this shard may not know yet."""
        if not self.has_started:
            self.advance(JobEvent.STARTED)

    @override
    def let_in(self, member: Member) -> list[Reply]:
        if member.phase is MemberPhase.SURVIVOR:
            self._start()  # it goes on where it was; who comes now has to join
        return super().let_in(member)

    @override
    def join(self, member: Member, request: int) -> list[Reply]:
        self._check_values()
        rank = member.rank
        if self._admissions.is_admitted(rank, member.incarnation, request):
            return [Reply(MessageType.OK, rank, request)]
        if not self.has_started and not member.phase.is_live:
            raise ProtocolError(f"job {self.name!r} has begun anew; say HELLO again", ErrorCode.NOT_MEMBER)
        others = [other for other in self.membership.live_ranks if other != rank]
        if not others:
            raise ProtocolError(f"job {self.name!r} has no live worker with state to give", ErrorCode.NOT_MEMBER)
        donor = self._admissions.join(rank, request, others)
        if member.phase.is_live:
            self._start()  # another shard says so, where this worker missed something
        replies = self._demote(rank)
        if donor is not None:
            wanted = {"rank": rank, "incarnation": member.incarnation}
            replies.append(Reply(MessageType.STATE_WANTED, donor, 0, body=wanted))
        return replies

    @override
    def admit(self, message: Message, donor: Member) -> list[Reply]:
        self._check_values()
        if not donor.phase.is_live:
            raise ProtocolError(f"worker {donor.rank} is not live and has no state to give", ErrorCode.FENCED)
        rank = message.body["rank"]
        joiner = self.membership.members.get(rank)
        if joiner is None or joiner.is_expected or joiner.incarnation != message.body["incarnation"]:
            return []  # gone meanwhile
        if not self._admissions.admit(rank, joiner.incarnation, (donor.rank, message.sequence)):
            return []  # its OK was lost
        was_live = joiner.phase.is_live
        if not joiner.phase.was_live:
            self._without_state.add(rank)
        self.membership.admit(rank)
        self.journal.members(self)
        if not was_live:
            self.record.note("joined", joiner, f" joined, with the state of worker {donor.rank}")
        for rule in self.rules:
            rule.progress.continue_from(rank, donor.rank, was_live=was_live)
        request = self._admissions.answer(rank)
        return [] if request is None else [Reply(MessageType.OK, rank, request)]

    @override
    def store(self, message: Message) -> None:
        reader = self._admissions.busy_with()
        # Chunks that nobody pushes, as of frozen parameters, are the same in all workers; and no push ends the reading.
        if reader is not None and any(rule.version for rule in self.rules):
            raise ProtocolError(
                f"worker {reader} is still reading what was deposited for it (expected STORE after its first push)",
                ErrorCode.NOT_READY,
            )
        super().store(message)

    def _check_values(self) -> None:
        if not self.is_sealed:
            raise ProtocolError(f"job {self.name!r} has begun anew; say HELLO again", ErrorCode.NOT_MEMBER)

    # ---- at work -----------------------------------------------------------------------------------------------

    @override
    def note_taken(self, rule: ChunkRule, message: Message, version: int) -> None:
        """Weights are in the workers, which send again what they pushed: only how far a chunk is has to be known."""
        if message.type in (MessageType.REGISTER, MessageType.CONFIGURE):
            self.journal.message(self, message)
        elif rule.version != version:
            self.journal.ended(self, rule.spec.key, rule.version)

    @override
    def hear_progress(self, message: Message, member: Member, now_s: float) -> list[Reply]:
        replies = [Reply(MessageType.OK, member.rank, message.sequence, body={"lost": [0, 0]})]
        for key, _, sequence in message.body["chunks"]:
            rule = self.chunks.find(key)
            if sequence and JobEvent.STARTED in JOB[self.phase]:
                self._start()  # before this server did: who lacks that exchange has to join
            if member.phase.is_live:
                replies += rule.note_answered(member.rank, sequence)
        return [*replies, *self._release()]

    @override
    def pushed(self, rank: int) -> list[Reply]:
        self._admissions.pushed(rank)
        self._without_state.discard(rank)
        return self._release()

    @property
    @override
    def is_readable(self) -> bool:
        return not self.has_started

    @override
    def is_missed(self, now_s: float) -> bool:
        return self.membership.is_remembered(now_s)

    @override
    def stood_still(self, pause_s: float) -> None:
        super().stood_still(pause_s)
        self._told_s += pause_s

    # ---- going -------------------------------------------------------------------------------------------------

    @override
    def leave(self, message: Message, member: Member) -> list[Reply]:
        self._check_values()
        self._leaving[member.rank] = message.sequence
        behind = self._behind(member.rank)
        return [Reply(MessageType.PROGRESS_WANTED, other, 0) for other in behind] or self._release()

    def _behind(self, rank: int) -> list[int]:
        """Live workers that lack an average which worker ``rank`` has, as far as is known here."""
        others = [other for other in self.membership.live_ranks if other != rank]
        reached = [(rule.progress, rule.progress.reached(rank)) for rule in self.rules]
        return [other for other in others if any(progress.reached(other) < mine for progress, mine in reached)]

    def _release(self) -> list[Reply]:
        """Answers to LEAVE that may leave now."""
        free = [rank for rank in self._leaving if not self._behind(rank)]
        return [Reply(MessageType.OK, rank, self._leaving.pop(rank)) for rank in free]

    @override
    def left(self, rank: int) -> list[Reply]:
        self._admissions.forget(rank)
        self._without_state.discard(rank)
        return self._leave_exchanges(rank)

    def _leave_exchanges(self, rank: int) -> list[Reply]:
        """Exchanges do not wait for this worker, nor for joiners that it was letting in.

        It may have admitted them at this shard alone; then they wait elsewhere for another donor, which can give no
        state before this exchange has ended.
        """
        replies = []
        for joiner in self._admissions.unread_from(rank):
            self._admissions.forget(joiner)
            replies += self._demote(joiner)
        self._leaving.pop(rank, None)
        return [*replies, *super().left(rank), *self._release()]
