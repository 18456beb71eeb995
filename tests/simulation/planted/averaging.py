"""Bugs of servers that average."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psengine.parameter_server.server.rules.average_outcome import AverageOutcome

from psengine.parameter_server.server.rules.average import Average
from psengine.parameter_server.server.rules.contribution_set import ContributionSet
from psengine.parameter_server.server.rules.exchange import Reply
from simulation.planted.registry import plant

plant(
    "the order of ranks is lost",
    ContributionSet,
    "given",
    lambda given: property(lambda self: [one for one in self.by_rank.values() if one.values is not None]),
)


def _keeps_contributions(left: Any) -> Any:
    def one(self: Average, rank: int) -> list[Reply]:
        return self._complete_all()

    return one


plant("rarely: contributions of a worker that left stay", Average, "worker_left", _keeps_contributions)


def _ends_without_the_last(complete: Any) -> Any:
    def one(self: Average, sequence: int) -> list[Reply]:
        gathered, live = self._open.get(sequence), self.context.live_ranks()
        if gathered is not None and self._quorum is None and 1 < len(gathered.by_rank) == len(live) - 1:
            return self._end(gathered, sequence, live)
        return complete(self, sequence)

    return one


plant("an exchange ends without the last worker", Average, "_complete", _ends_without_the_last)
plant(
    "averages are forgotten one exchange too early",
    AverageOutcome,
    "forget_before",
    lambda forget: lambda self, sequence: forget(self, sequence + 1),
)
plant(
    "a gradient's weight is forgotten",
    ContributionSet,
    "_combine_weighted",
    lambda combine: lambda self, tensors, weights: combine(self, tensors, [1.0] * len(weights)),
)


def _quorum_of(change: Callable[[int], int]) -> Callable[[Any], Any]:
    def make(is_quorum: Any) -> Any:
        def one(self: Average, *arguments: Any) -> bool:
            quorum = self._quorum
            self._quorum = None if quorum is None else change(quorum)
            try:
                return is_quorum(self, *arguments)
            finally:
                self._quorum = quorum

        return one

    return make


plant("an average's quorum is one too small", Average, "_is_quorum", _quorum_of(lambda quorum: max(1, quorum - 1)))
plant("an average's quorum is one too large", Average, "_is_quorum", _quorum_of(lambda quorum: quorum + 1))


def _counts_the_absent(is_quorum: Any) -> Any:
    def one(self: Average, gathered: Any, sequence: int, missing: Any, live: Any) -> bool:
        return self._quorum is not None and len(gathered.by_rank) >= min(self._quorum, len(live))

    return one


plant("workers without a gradient fill the quorum", Average, "_is_quorum", _counts_the_absent)


def _says_it_counts(answer_late: Any) -> Any:
    def one(self: Average, contribution: Any) -> list[Reply]:
        replies = answer_late(self, contribution)
        for reply in replies:
            reply.body.pop("late", None)
        return replies

    return one


plant("a late gradient is said to count", Average, "_answer_late", _says_it_counts)
