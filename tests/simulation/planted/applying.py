"""Bugs of servers that apply updates, or merge them."""

from __future__ import annotations

from typing import Any

from psengine.parameter_server.server.rules.grace import GraceWindow
from psengine.parameter_server.server.rules.step import StepOutcome

from psengine.parameter_server.server.rules.apply import Apply
from psengine.parameter_server.server.rules.exchange import Reply
from psengine.parameter_server.server.rules.merge import Merge
from psengine.protocol.messages import MessageType
from simulation.planted.registry import plant


def _window_off_by_one(gather: Any) -> Any:
    def one(self: Apply, contribution: Any) -> list[Reply]:
        known = self.progress.last_sequence
        if known.get(contribution.rank) == contribution.sequence:
            known[contribution.rank] -= 1
        return gather(self, contribution)

    return one


def _takes_new_numbers_only_in_order(gather: Any) -> Any:
    def one(self: Apply, contribution: Any) -> list[Reply]:
        self.progress.last_sequence.setdefault(contribution.rank, 1)
        return gather(self, contribution)

    return one


def _answers_before_it_applies(conclude: Any) -> Any:
    def one(self: StepOutcome, sequence: int, update: Any) -> None:
        if sequence % 5:
            conclude(self, sequence, update)

    return one


plant("the window of numbers is off by one", Apply, "_gather", _window_off_by_one)
plant("the first push of a worker is taken for a repeat", Apply, "_gather", _takes_new_numbers_only_in_order)
plant("every fifth update is acknowledged and dropped", StepOutcome, "conclude", _answers_before_it_applies)


def _probe_repeats(probe: Any) -> Any:
    def one(self: Apply, rank: int, sequence: int) -> list[Reply]:
        replies = probe(self, rank, sequence)
        if replies and replies[0].type is MessageType.SENT:
            return [self._answer(rank, sequence, repeated=True)]
        return replies

    return one


plant("a probe repeats the answer", Apply, "probe", _probe_repeats)
plant(
    "a probe of a push that is here says missing, and forgets it",
    Apply,
    "probe",
    lambda probe: (
        lambda self, rank, sequence: (
            self.progress.last_sequence.__setitem__(rank, sequence - 1),
            probe(self, rank, sequence),
        )[1]
    ),
)


def _one_more(slower: Any) -> Any:
    def one(self: Apply, rank: int) -> list[int]:
        clock = self._clocks.get(rank, 0)
        self._clocks[rank] = clock - 1
        try:
            return slower(self, rank)
        finally:
            self._clocks[rank] = clock

    return one


plant("the staleness bound is off by one", Apply, "_slower", _one_more)


def _clock_of_a_newcomer(came: Any) -> Any:
    def one(self: Apply, rank: int, *, is_new_process: bool) -> list[Reply]:
        replies = came(self, rank, is_new_process=is_new_process)
        self._clocks[rank] = max(self._clocks.values())
        return replies

    return one


plant("a newcomer starts level with the fastest", Apply, "worker_came", _clock_of_a_newcomer)
plant(
    "a new process goes on with the numbers of its predecessor",
    Apply,
    "worker_came",
    lambda came: lambda self, rank, *, is_new_process: came(self, rank, is_new_process=False),
)
plant(
    "a worker that comes back begins its numbers anew",
    Apply,
    "worker_came",
    lambda came: lambda self, rank, *, is_new_process: came(self, rank, is_new_process=True),
)


def _old_version(answer: Any) -> Any:
    def one(self: StepOutcome, rank: int, sequence: int, *, repeated: bool = False) -> Reply:
        reply = answer(self, rank, sequence, repeated=repeated)
        reply.version -= repeated
        return reply

    return one


plant("a repeated answer has the version before", StepOutcome, "answer", _old_version)


plant(
    "a merge does not wait for its window",
    GraceWindow,
    "is_over",
    lambda is_over: lambda self, absent, now_s: True,
)
plant(
    "a merge does not wait for its quorum",
    Merge,
    "_absent",
    lambda absent: lambda self: absent(self)[:-1],
)
plant(
    "a merge forgets which pushes it took",
    Merge,
    "_take",
    lambda take: lambda self, contribution: None,
)
