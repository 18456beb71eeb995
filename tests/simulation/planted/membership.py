"""Bugs of who is a worker of a job, and of how it begins to take part."""

from __future__ import annotations

from typing import Any

from psengine.parameter_server.server.core.job import Job
from psengine.parameter_server.server.core.worker_weights import AveragingJob

from psengine.parameter_server.server.core.membership import Membership
from psengine.parameter_server.server.rules.exchange import Progress, Reply
from psengine.protocol.messages import MessageType
from simulation.planted.registry import plant


def _find_anybody(find: Any) -> Any:
    def one(self: Membership, message: Any, user_id: str, route: bytes, now_s: float) -> Any:
        member = self.members.get(message.worker)
        return find(self, message, user_id, route, now_s) if member is None else member

    return one


plant("old incarnations are not fenced", Membership, "find", _find_anybody)


def _same_incarnation(greet: Any) -> Any:
    def one(self: Membership, hello: Any, user_id: str, route: bytes, progress: int, now_s: float) -> Any:
        greeting = greet(self, hello, user_id, route, progress, now_s)
        if not isinstance(greeting, str) and not hello.incarnation:
            greeting.member.incarnation = 7
        return greeting

    return one


plant("every process of a rank gets the same incarnation", Membership, "greet", _same_incarnation)


plant("leases never run out", Membership, "expired", lambda expired: lambda self, now_s: [])
plant(
    "a lease is half as long",
    Membership,
    "expired",
    lambda expired: lambda self, now_s: expired(self, now_s + self.lease_s / 2),
)
plant(
    "a lease is twice as long",
    Membership,
    "expired",
    lambda expired: lambda self, now_s: expired(self, now_s - self.lease_s),
)
plant(
    "a pause of a server counts as its workers' silence",
    Job,
    "stood_still",
    lambda stood_still: lambda self, pause_s: None,
)
plant(
    "a joiner goes on one exchange too late",
    Progress,
    "continue_from",
    lambda go_on: (
        lambda self, rank, donor, *, was_live: (
            go_on(self, rank, donor, was_live=was_live),
            self.last_sequence.__setitem__(rank, self.last_sequence.get(rank, 0) + 1),
        )[0]
    ),
)


def _joins_at_once(join: Any) -> Any:
    def one(self: AveragingJob, member: Any, request: int) -> list[Reply]:
        replies = join(self, member, request)
        return [*replies, Reply(MessageType.OK, member.rank, request), *self.let_in(member)]

    return one


plant("a joiner is let in before its donor has deposited anything", AveragingJob, "join", _joins_at_once)


def _missed_nothing(place: Any) -> Any:
    def one(self: AveragingJob, greeting: Any, member: Any, now_s: float) -> Any:
        if member.phase.was_live and self.membership.live_ranks:
            return "ready", self.let_in(member)
        return place(self, greeting, member, now_s)

    return one


plant("a worker that comes back has missed nothing", AveragingJob, "_place", _missed_nothing)
