"""Corrections of bugs that the simulator has found, undone: ``test_found.py`` has a scenario for each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

from psengine.parameter_server.client import handshake, join
from psengine.parameter_server.client.link import Link
from psengine.parameter_server.client.membership import Membership as Client
from psengine.parameter_server.client.operation import Operation
from psengine.parameter_server.client.progress import Ledger
from psengine.parameter_server.server.core.admission import Admissions
from psengine.parameter_server.server.core.job import Job
from psengine.parameter_server.server.core.life import MEMBER, JobPhase, MemberEvent, MemberPhase
from psengine.parameter_server.server.core.membership import Membership
from psengine.parameter_server.server.core.weights_in_workers import AveragingJob
from psengine.parameter_server.server.rules.chunk_rule import ChunkRule
from psengine.parameter_server.server.rules.exchange import Progress, Reply
from psengine.parameter_server.server.rules.merge import Merge
from psengine.parameter_server.server.rules.together import Together
from psengine.protocol.messages import ErrorCode, MessageType
from simulation.planted.registry import PLANTED, plant


def _forgets(*names: str) -> Callable[[Any], Any]:
    def make(greet: Any) -> Any:
        def one(self: Membership, *arguments: Any) -> Any:
            for name in names:
                getattr(self, name).clear()
            return greet(self, *arguments)

        return one

    return make


plant("again: a process that was replaced may come back", Membership, "greet", _forgets("_replaced", "_ended"))


plant(
    "again: a job without live workers gets its chunks from worker 0",
    AveragingJob,
    "initialiser",
    lambda initialiser: property(
        lambda self: (
            self.membership.live_ranks[0] if self.phase is JobPhase.REBUILDING and self.membership.live_ranks else 0
        )
    ),
)


plant(
    "again: a worker catches up on averages that nobody has",
    ChunkRule,
    "can_catch_up",
    lambda can_catch_up: (
        lambda self, rank, reached: self.outcome.can_answer(self.progress.last_sequence.get(rank, 0) + 1, self.version)
    ),
)
for name in (
    "again: merges of several chunks wait for each other",
    "again: chunks that disagree about who is ahead wait for each other",
):
    plant(name, Job, "_are_stuck", lambda are_stuck: lambda self, ranks: False)


def _begins_with_a_life_before(settle: Any) -> Any:
    def one(self: Ledger, epoch: int) -> None:
        before = () if self.epoch else self.epochs - {0, epoch}
        settle(self, min(before, default=epoch))

    return one


plant("again: updates count for the server that a worker greeted first", Ledger, "settle", _begins_with_a_life_before)


def _merges_without_those_told_first(left: Any) -> Any:
    def one(self: Merge, rank: int) -> list[Reply]:
        known = {*self.context.live_ranks(), *self._gathered.by_rank} - {rank}
        with mock.patch.object(self.context, "live_ranks", return_value=tuple(sorted(known))):
            return left(self, rank)

    return one


plant("again: who goes with others is merged for want of them", Merge, "worker_left", _merges_without_those_told_first)


plant(
    "again: a job that begins anew waits for worker 0 where another has its state",
    AveragingJob,
    "initialiser",
    lambda initialiser: property(lambda self: 0 if self.phase is JobPhase.ORPHANED else initialiser.fget(self)),
)


def _takes_newcomers_for_new(stack: ExitStack) -> None:
    knew_others = {MemberEvent.KNEW_OTHERS: MemberPhase.NEWCOMER}
    stack.enter_context(mock.patch.dict(MEMBER[MemberPhase.NEWCOMER], knew_others))


for name in (
    "again: a worker that returns with state is taken for one without, because a new one had its rank",
    "again: a job without state waits for worker 0, which has ended, and not for one that had some",
    "again: a job without state waits for worker 0, which has ended, and not for one with averages",
):
    PLANTED[name] = _takes_newcomers_for_new


plant("again: a process of a former life counts for one that has ended", Membership, "greet", _forgets("_ended"))


plant(
    "again: a worker is asked for an average that a later one has overwritten",
    Progress,
    "answered",
    lambda answered: lambda self, rank: self.said(rank) or answered(self, rank),
)


def _waits_for_all(membership: Any, requests: Any) -> Any:
    yield requests
    return True


plant(
    "again: a JOIN waits for a shard that knew nothing of the joiner when it was admitted",
    join,
    "_await_all_or_none",
    lambda await_all_or_none: _waits_for_all,
)


def _waits_for_the_rest(fence: Any) -> Any:
    def one(self: Link, error: Any, now_s: float) -> None:
        joins = [request for request in self._requests.values() if request.message.type is MessageType.JOIN]
        for request in joins:
            del self._requests[request.message.sequence]
        fence(self, error, now_s)
        self._requests.update({request.message.sequence: request for request in joins})

    return one


def _goes_on_joining(stack: ExitStack) -> None:
    """Two corrections are undone: without either it joins anew."""
    stack.enter_context(mock.patch.object(Link, "fence", _waits_for_the_rest(Link.fence)))
    stack.enter_context(mock.patch.object(join, "_await_all_or_none", _waits_for_all))


PLANTED["again: a JOIN goes on after a recovery, where other shards have answered it"] = _goes_on_joining


plant(
    "again: a worker that has to rejoin deposits its state for another",
    Operation,
    "is_of_a_live_worker",
    lambda is_of: property(lambda self: self.message.type is not MessageType.STORE and is_of.fget(self)),
)


plant(
    "again: a worker is let in by an ADMIT for a JOIN that it has given up",
    Membership,
    "is_said_anew",
    lambda is_said_anew: lambda self, hello, user_id: False,
)


def _takes_any_join(join: Any) -> Any:
    def one(self: Admissions, rank: int, request: int, live: Any) -> Any:
        self._joins.pop(rank, None)
        return join(self, rank, request, live)

    return one


def _gives_up_nothing(abandon: Any) -> Any:
    return lambda self: None


def _joins_twice(stack: ExitStack) -> None:
    stack.enter_context(mock.patch.object(Admissions, "join", _takes_any_join(Admissions.join)))
    stack.enter_context(mock.patch.object(Operation, "abandon", _gives_up_nothing(Operation.abandon)))
    stack.enter_context(mock.patch.object(join, "_await_all_or_none", _waits_for_all))


PLANTED["again: a JOIN that was given up is answered, and not the one that counts"] = _joins_twice


def _supplies_any(ask: Any) -> Any:
    def one(self: Together, sequence: int) -> list[Reply]:
        quorum, self._quorum = self._quorum, None
        try:
            return ask(self, sequence)
        finally:
            self._quorum = quorum

    return one


plant("again: an average without its contributors is taken under a quorum", Together, "_ask_for_result", _supplies_any)


def _hears_nothing_while_held(receive: Any) -> Any:
    def one(self: Link, message: Any, now_s: float) -> None:
        lost = message.body.get("code") in (ErrorCode.FENCED, ErrorCode.NOT_MEMBER)
        if not (self.is_paused and lost):
            receive(self, message, now_s)

    return one


plant("again: a recovery does not hear that it was in vain", Link, "_receive_error", _hears_nothing_while_held)


plant(
    "again: a shard that was sealed before worker 0 died takes no values",
    Job,
    "check_registering",
    lambda check: Job._check_initialiser,
)


plant(
    "again: a state is deposited while another joiner reads one",
    AveragingJob,
    "store",
    lambda store: Job.store,
)


def _forgets_who_is_expected(greet: Any) -> Any:
    def one(self: Membership, hello: Any, *arguments: Any) -> Any:
        holder = self.members.get(hello.body.get("rank"))
        if holder is not None and holder.is_expected:
            self._absent.pop(holder.rank, None)
        return greet(self, hello, *arguments)

    return one


def _takes_who_is_expected_for_new(stack: ExitStack) -> None:
    """Two corrections are undone: each finds somebody to go on from."""
    stack.enter_context(mock.patch.object(Membership, "greet", _forgets_who_is_expected(Membership.greet)))
    _takes_newcomers_for_new(stack)


PLANTED["again: a worker that others name and that has to join is taken for a new one"] = _takes_who_is_expected_for_new


class _EveryLife(set[int]):
    """All numbers: no life of a server is one that has yet to let this worker in."""

    def __contains__(self, epoch: object) -> bool:
        return True


def _knows_every_life(welcomed: Any) -> Any:
    def one(self: Ledger, *arguments: Any) -> None:
        welcomed(self, *arguments)
        self.epochs = _EveryLife()

    return one


plant("again: a recovery does not hear of one more restart", Ledger, "welcomed", _knows_every_life)


def _answers_first(gather: Any) -> Any:
    def one(self: Merge, contribution: Any) -> list[Reply]:
        version = self.progress.version
        replies = gather(self, contribution)
        if replies and replies[0].body.get("refused") == "abstained":
            replies[0].version = version
        return replies

    return one


plant("again: who abstains gets newer weights than their version", Merge, "_gather", _answers_first)


def _waits_for_the_idle(go_on: Any) -> Any:
    def one(self: Merge, meta: Any, tensors: Any) -> None:
        go_on(self, meta, tensors)
        self._idle.clear()

    return one


plant("again: a recovery waits for workers that abstained", Merge, "go_on", _waits_for_the_idle)


def _counts_for_its_predecessor(late: Any) -> Any:
    def one(self: Together, contribution: Any) -> list[Reply]:
        ended = dict(self._ended)
        replies = late(self, contribution)
        self._ended.update({known: ranks for known, ranks in ended.items() if known in self._ended})
        for reply in replies:
            if contribution.rank in ended.get(reply.sequence, ()):
                reply.body.pop("late", None)
        return replies

    return one


plant("again: a process counts for its predecessor", Together, "_answer_late", _counts_for_its_predecessor)


def _waits_for_the_idle_and_stuck(merge: Any) -> Any:
    def one(self: Merge, absent: list[int]) -> list[Reply]:
        window, here, live = self._window, self._gathered.by_rank, self.context.live_ranks()
        is_over = window.is_over

        def waits(absent: Any, now_s: float) -> bool:
            awaited = {rank for rank in window._awaited if rank in live and rank not in here}
            return is_over(awaited if absent else (), now_s)

        window.is_over = waits  # type: ignore[method-assign]
        try:
            return merge(self, absent)
        finally:
            del window.is_over

    return one


plant(
    "again: a grace window waits for workers that bring nothing",
    Merge,
    "_merge_unless_waiting_for",
    _waits_for_the_idle_and_stuck,
)


def _merges_without_the_stuck(self: Merge) -> list[Reply]:
    return self._merge_unless_waiting_for([rank for rank in self._absent() if not self.context.are_stuck([rank])])


def _takes_the_answered_for_stuck(stack: ExitStack) -> None:
    stack.enter_context(mock.patch.object(Client, "_are_pushes_held", return_value=True))
    stack.enter_context(mock.patch.object(Merge, "_merge_if_complete", _merges_without_the_stuck))


PLANTED["again: a worker that has just been answered counts as stuck"] = _takes_the_answered_for_stuck


for verdict, name in (
    ("alone", "again: two workers wait for each other's state, each let in by another shard"),
    ("initialise", "again: a shard waits for workers of a job that begins anew"),
):
    plant(
        name,
        handshake,
        "_verdict",
        lambda found, verdict=verdict: lambda *arguments: None if (one := found(*arguments)) == verdict else one,
    )


def _has_always_started(shake_hands: Any) -> Any:
    def one(membership: Any) -> Any:
        welcome = yield from shake_hands(membership)
        return handshake.Welcome(welcome.states, has_started=True)

    return one


plant(
    "again: an old process of worker 0 takes its values from one shard", handshake, "shake_hands", _has_always_started
)
plant(
    "again: a new worker reads what is deposited for another, as one shard lets it in",
    handshake.Welcome,
    "state",
    lambda state: property(lambda self: self.states[0]),
)


def _has_missed_nothing(remove: Any) -> Any:
    def one(self: Membership, rank: int, *, progress: int, now_s: float, forget: bool = False) -> None:
        remove(self, rank, progress=progress, now_s=now_s, forget=forget)
        if rank in self._absent:
            self._absent[rank].progress = progress

    return one


plant("again: a joiner that is put out has missed nothing", Membership, "remove", _has_missed_nothing)
