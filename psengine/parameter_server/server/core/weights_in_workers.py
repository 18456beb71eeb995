"""A job whose weights are in its workers: a joiner needs another's state; who leaves takes its own along. Pure."""

from __future__ import annotations

import logging
from collections.abc import Collection

from typing_extensions import override

from psengine.errors import ProtocolError
from psengine.parameter_server.server.core.admission import Admissions
from psengine.parameter_server.server.core.leaving import Leaving
from psengine.parameter_server.server.core.life import JOB, JobEvent, JobPhase, MemberPhase
from psengine.parameter_server.server.core.membership import Greeting, Member
from psengine.parameter_server.server.core.team import Team
from psengine.parameter_server.server.core.weights import Weights
from psengine.parameter_server.server.rules.exchange import Reply
from psengine.protocol.messages import ErrorCode, Message, MessageType

logger = logging.getLogger(__name__)


class WeightsInWorkers(Weights):
    """See the module's text."""

    def __init__(self, team: Team) -> None:
        super().__init__(team)
        self._leaving = Leaving()
        self._admissions = Admissions(one_at_a_time=team.rule.body.get("quorum") is not None)
        # When a worker said that the job is under way, which this server did not know.
        self._told_s = 0.0

    @property
    @override
    def initialiser(self) -> int:
        """0, or the lowest that is left of a job that is under way."""
        live = self._team.membership.live_ranks
        return live[0] if self._team.phase is JobPhase.REBUILDING and live else 0

    @override
    def told(self, members: Collection[int], now_s: float) -> None:
        """If this server is new to the job, wait one lease for all who were in it.

        Workers' lists may differ by who came last; those named once an exchange has ended have missed it, and join.
        """
        team = self._team
        if members and JobEvent.TOLD in JOB[team.phase]:
            logger.warning("job %r is under way already; waiting for its workers %s", team.name, sorted(members))
            team.advance(JobEvent.TOLD)
            self._told_s = now_s
        waits = team.phase in (JobPhase.REBUILDING, JobPhase.RESUMING)
        if members and waits and now_s - self._told_s <= team.membership.lease_s:
            team.membership.expect(members, now_s)

    @override
    def place(self, greeting: Greeting, member: Member, now_s: float) -> tuple[str, list[Reply]]:
        team, rank = self._team, member.rank
        if not team.has_started and member.phase is MemberPhase.SURVIVOR:
            return self._go_on_from(member)
        if not team.has_started or (greeting.missed_nothing and member.phase.was_live):
            return "ready", team.admit(member)
        if team.membership.live_ranks:
            self._admissions.forget(rank)
            return "join", []
        if member.phase.was_live:
            if greeting.progress >= 0 and all(rule.can_catch_up(rank) for rule in team.rules):
                return "ready", team.admit(member)
            if team.membership.may_others_be_ahead(rank, greeting.progress, now_s):
                return "wait", []
            return self._go_on_from(member)
        if team.membership.has_survivor(rank, now_s):
            return "wait", []  # it has the state that this one lacks
        self._begin_anew()
        return "initialise" if rank == self.initialiser else "wait", []

    def _go_on_from(self, member: Member) -> tuple[str, list[Reply]]:
        """It alone has state; others, if any, are of a life of the job in which nothing happened yet."""
        team = self._team
        logger.warning("job %r goes on from worker %d, the only one left", team.name, member.rank)
        text = f"job {team.name!r} goes on from worker {member.rank}, which returned with its state"
        fenced = {"code": ErrorCode.FENCED, "text": text}
        replies = [Reply(MessageType.ERROR, rank, 0, body=fenced) for rank in team.membership.live_ranks]
        team.start()
        team.membership.lose_track()
        for rule in team.rules:
            rule.reset()
        return "ready", [*replies, *team.admit(member)]

    def _begin_anew(self) -> None:
        """Nobody is left who knows where the job stood."""
        team = self._team
        logger.warning("job %r begins anew: all its workers are gone", team.name)
        team.advance(JobEvent.ORPHANED)
        team.came.clear()
        team.membership.begin_anew()
        team.chunks.clear()

    @override
    def sealed(self, member: Member) -> None:
        if member.phase is MemberPhase.SURVIVOR:
            self._team.start()  # it goes on where it was; who comes now has to join

    @override
    def restored(self) -> None:
        """Workers say themselves how far they are."""

    @override
    def join(self, member: Member, request: int) -> list[Reply]:
        self._check_values()
        team, rank = self._team, member.rank
        if self._admissions.is_admitted(rank, member.incarnation, request):
            return [Reply(MessageType.OK, rank, request)]
        if not team.has_started and not member.phase.is_live:
            raise ProtocolError(f"job {team.name!r} has begun anew; say HELLO again", ErrorCode.NOT_MEMBER)
        others = [other for other in team.membership.live_ranks if other != rank]
        if not others:
            raise ProtocolError(f"job {team.name!r} has no live worker with state to give", ErrorCode.NOT_MEMBER)
        donor = self._admissions.join(rank, request, others)
        replies: list[Reply] = []
        if member.phase.is_live:
            team.start()  # another shard says so, where this worker missed something
            team.membership.demote(rank)
            replies = self._leave_exchanges(rank)
        if donor is not None:
            wanted = {"rank": rank, "incarnation": member.incarnation}
            replies.append(Reply(MessageType.STATE_WANTED, donor, 0, body=wanted))
        return replies

    @override
    def admit(self, message: Message, donor: Member) -> list[Reply]:
        self._check_values()
        if not donor.phase.is_live:
            raise ProtocolError(f"worker {donor.rank} is not live and has no state to give", ErrorCode.FENCED)
        team, rank = self._team, message.body["rank"]
        joiner = team.membership.members.get(rank)
        if joiner is None or joiner.is_expected or joiner.incarnation != message.body["incarnation"]:
            return []  # gone meanwhile
        if not self._admissions.admit(rank, joiner.incarnation, (donor.rank, message.sequence)):
            return []  # its OK was lost
        was_live = joiner.phase.is_live
        team.membership.admit(rank)
        if not was_live:
            team.record.joined(joiner, donor.rank)
        for rule in team.rules:
            rule.progress.continue_from(rank, donor.rank, was_live=was_live)
        request = self._admissions.answer(rank)
        return [] if request is None else [Reply(MessageType.OK, rank, request)]

    @override
    def leave(self, message: Message, member: Member) -> list[Reply]:
        self._check_values()
        self._leaving.ask(member.rank, message.sequence)
        questions = self._leaving.questions(member.rank, self._team.rules, self._team.membership.members)
        return questions or self._release()

    def _release(self) -> list[Reply]:
        """Answers to LEAVE that may leave now."""
        return self._leaving.release(self._team.rules, self._team.membership.live_ranks) if self._leaving else []

    def _check_values(self) -> None:
        if not self._team.is_sealed:
            raise ProtocolError(f"job {self._team.name!r} has begun anew; say HELLO again", ErrorCode.NOT_MEMBER)

    @override
    def hear_progress(self, message: Message, member: Member, now_s: float) -> list[Reply]:
        replies = [Reply(MessageType.OK, member.rank, message.sequence, body={"lost": [0, 0, 0]})]
        for key, _, sequence, *_ in message.body["chunks"]:
            rule = self._team.chunks.find(key)
            if member.phase.is_live:
                replies += rule.note_answered(member.rank, sequence)
        return [*replies, *self._release()]

    @override
    def left(self, rank: int) -> list[Reply]:
        self._admissions.forget(rank)
        return self._leave_exchanges(rank)

    def _leave_exchanges(self, rank: int) -> list[Reply]:
        """Nor do exchanges wait for joiners that this worker was letting in.

        Perhaps it did so at this shard alone, and then they wait elsewhere for another donor, who can give no state
        before this exchange has ended.
        """
        replies = []
        for joiner in self._admissions.unread_from(rank):
            self._admissions.forget(joiner)
            if joiner in self._team.membership.live_ranks:
                self._team.membership.demote(joiner)
                replies += self._leave_exchanges(joiner)
        self._leaving.forget(rank)
        return [*replies, *super().left(rank), *self._release()]

    @override
    def pushed(self, rank: int) -> list[Reply]:
        self._admissions.pushed(rank)
        return self._release()

    @override
    def check_readable(self) -> None:
        if self._team.has_started:
            raise ProtocolError(
                f"job {self._team.name!r} averages gradients; its weights are in its workers, not here",
                ErrorCode.NOT_READY,
            )

    @override
    def is_missed(self, now_s: float) -> bool:
        return self._team.membership.is_remembered(now_s)

    @override
    def tick(self, now_s: float) -> None:
        """Nothing is due."""

    @override
    def stood_still(self, pause_s: float) -> None:
        self._told_s += pause_s
