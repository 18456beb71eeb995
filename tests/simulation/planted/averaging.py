"""Bugs of servers that average."""

from __future__ import annotations

from typing import Any

from psengine.parameter_server.server.rules.average import AverageOutcome
from psengine.parameter_server.server.rules.contribution_set import ContributionSet
from psengine.parameter_server.server.rules.exchange import Reply
from psengine.parameter_server.server.rules.together import Together
from simulation.planted.registry import plant

plant(
    "the order of ranks is lost",
    ContributionSet,
    "given",
    lambda given: property(lambda self: [one for one in self.by_rank.values() if one.values is not None]),
)


def _keeps_contributions(left: Any) -> Any:
    def one(self: Together, rank: int) -> list[Reply]:
        return self._complete_all()

    return one


plant("contributions of a worker that left stay", Together, "worker_left", _keeps_contributions)


def _ends_without_the_last(complete: Any) -> Any:
    def one(self: Together, sequence: int) -> list[Reply]:
        gathered, live = self._open.get(sequence), self.context.live_ranks()
        if gathered is not None and self._quorum is None and 1 < len(gathered.by_rank) == len(live) - 1:
            return self._end(gathered, sequence, live)
        return complete(self, sequence)

    return one


plant("an exchange ends without the last worker", Together, "_complete", _ends_without_the_last)
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
