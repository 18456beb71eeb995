"""What the coordinator decides once a step for all chunks, by counting workers' COMMITs. Pure.

    bound    the floor: the step that every worker has committed; nobody gets answers of steps that are too far above it
    merge    whose contributions make the next merge

A job without such a rule has ``Decisions``, which decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from psengine.parameter_server.server.coordinator.states import JobMemory
from psengine.parameter_server.server.coordinator.workers import Worker
from psengine.protocol.views import Release


class Decisions:
    """See the module's text.

    Attributes:
        job: ``releases`` has what was decided, as long as some shard may not have it.
        members: of the view.
    """

    def __init__(self, job: JobMemory) -> None:
        self.job = job
        self.members: list[Worker] = []

    def adopt(self, members: list[Worker]) -> None:
        """A view is about to be published."""
        self.members = members
        for one in members:  # what a worker has the answers to, it has committed, perhaps to a former coordinator
            one.committed = max(one.committed, one.first_step - 1, one.completed)
        self.prune()

    def commit(self, worker: Worker, step: int, *, abstained: bool, now_s: float) -> None:
        """Every shard has a member's pushes of a step; said again it changes nothing."""
        worker.committed = max(worker.committed, step)

    def decide(self, now_s: float) -> bool:
        """Release what can be decided now; whether that has to be on the disk, and is not decided anew otherwise."""
        return False

    def first_step(self, worker: Worker) -> int:
        """Of a worker that comes, where servers hold the weights."""
        return worker.completed + 1

    def prune(self) -> None:
        """Forget the releases that every shard has."""
        self.job.releases.clear()

    def learn(self) -> None:
        """The job's releases are a former coordinator's."""

    def lose(self, *, keeps_log: bool) -> None:
        """A shard may have lost what workers committed, and without a log what it had answered."""

    def _release(self, step: int, contributors: tuple[tuple[int, int], ...] | None = None) -> None:
        assert self.job.view is not None
        # Numbers grow from view to view, also past those of a coordinator whose numbers are forgotten.
        number = max([self.job.view.number << 32, *(one.number for one in self.job.releases)]) + 1
        self.prune()
        self.job.releases.append(Release(number, step, contributors))

    def _least(self) -> int:
        return min((one.committed for one in self.members), default=0)


class Bound(Decisions):
    """Nobody is more than a bound ahead of the slowest worker; one that never came has committed nothing."""

    @override
    def decide(self, now_s: float) -> bool:
        least = 0 if self.job.missing else self._least()
        if least > self._floor():
            self._release(least)
        return False

    def _floor(self) -> int:
        return max((one.step for one in self.job.releases), default=0)

    @override
    def first_step(self, worker: Worker) -> int:
        return max(worker.completed, self._floor()) + 1

    @override
    def prune(self) -> None:
        del self.job.releases[:-1]


@dataclass(slots=True)
class _Pace:
    """A worker's contributions."""

    pending: int = 0  # the step of one that no merge has yet
    is_idle: bool = False  # it abstained last
    last_s: float = -math.inf  # when its last one came
    interval_s: float = math.inf  # between two; half of it is the last interval: who has slowed down is known soon


class Merge(Decisions):
    """Workers go at their own pace; a merge has what a quorum, and who came in the grace window, brought.

    The window opens when a quorum is there. It is ``grace`` times the mean time between two contributions of a worker,
    of those who are here, and is for those who are expected within it. A worker that abstained last is not waited for
    until it has brought something again, nor one that waits in a collective, perhaps for those who are here.
    """

    def __init__(self, job: JobMemory, quorum: int, grace: float) -> None:
        super().__init__(job)
        self._quorum = quorum
        self._grace = grace
        self._paces: dict[Worker, _Pace] = {}
        self._lost: list[tuple[int, int]] = []  # (rank, step) of contributions of which a restart lost the merge
        # While a quorum is here: when the window ends, and for whom it waits.
        self._window: tuple[float, frozenset[Worker]] | None = None

    @override
    def adopt(self, members: list[Worker]) -> None:
        super().adopt(members)
        self._paces = {one: self._paces.get(one, _Pace()) for one in members}

    @override
    def commit(self, worker: Worker, step: int, *, abstained: bool, now_s: float) -> None:
        pace, place = self._paces[worker], (worker.rank, step)
        if step <= self.job.merged.get(worker.rank, 0):
            is_named = any(place in (one.contributors or ()) for one in self.job.releases)
            if step > worker.completed and not (is_named or abstained or place in self._lost):
                self._lost.append(place)
            return
        if step <= pace.pending:
            return
        pace.is_idle, worker.is_elsewhere = abstained, False
        if abstained:
            self.job.merged[worker.rank] = step
            return
        pace.pending = step
        passed_s = now_s - pace.last_s
        pace.interval_s = passed_s if pace.interval_s == math.inf else (pace.interval_s + passed_s) / 2
        pace.last_s = now_s

    def _here(self) -> list[Worker]:
        return [one for one, pace in self._paces.items() if pace.pending]

    def _absent(self) -> list[Worker]:
        """Whose contribution may come before those who are here go on."""
        return [one for one, pace in self._paces.items() if not (pace.pending or pace.is_idle or one.is_elsewhere)]

    @override
    def decide(self, now_s: float) -> bool:
        if self._lost:
            # Each alone: shards that have answered it wait for its worker's next push, and for nobody else's.
            self.job.decided += 1
            self._release(self.job.decided, contributors=(self._lost.pop(0),))
            return True
        here, absent = self._here(), self._absent()
        # Where fewer are left than the quorum, these are all that it can have.
        if not here or len(here) < min(self._quorum, len(here) + len(absent) + len(self.job.missing)):
            self._window = None
            return False
        if self._window is None:
            self._window = self._opened(here, absent, now_s)
        if not self._is_over(absent, now_s):
            return False
        contributors = tuple((one.rank, self._paces[one].pending) for one in here)
        for one in here:
            self.job.merged[one.rank] = max(self.job.merged.get(one.rank, 0), self._paces[one].pending)
            self._paces[one].pending = 0
        self._window = None
        self.job.decided += 1
        self._release(self.job.decided, contributors)
        return True

    def _opened(
        self, here: Sequence[Worker], absent: Sequence[Worker], now_s: float
    ) -> tuple[float, frozenset[Worker]]:
        known = [self._paces[one].interval_s for one in here if self._paces[one].interval_s < math.inf]
        end_s = now_s + (self._grace * sum(known) / len(known) if known else 0.0)
        return end_s, frozenset(one for one in absent if self._paces[one].last_s + self._paces[one].interval_s <= end_s)

    def _is_over(self, absent: Sequence[Worker], now_s: float) -> bool:
        """Whether the merge goes on without those who are not here."""
        assert self._window is not None
        return now_s >= self._window[0] or self._window[1].isdisjoint(absent)

    @override
    def first_step(self, worker: Worker) -> int:
        return max([worker.completed, *self.job.merged.values()]) + 1

    @override
    def prune(self) -> None:
        """Shards apply merges in order, so whoever has the answer to one proves that all have it, and all before."""
        has = {one.rank: range(one.first_step, one.completed + 1) for one in self.members}
        taken = [
            release.number
            for release in self.job.releases
            if any(step in has.get(rank, ()) for rank, step in release.contributors or ())
        ]
        self.job.releases = [one for one in self.job.releases if one.number > max(taken, default=0)]

    @override
    def lose(self, *, keeps_log: bool) -> None:
        """Workers commit again what has no answer: it is named anew."""
        for pace in self._paces.values():
            pace.pending = 0
        if not keeps_log:
            self.job.releases.clear()

    @override
    def learn(self) -> None:
        for release in self.job.releases:
            self.job.decided = max(self.job.decided, release.step)
            for rank, step in release.contributors or ():
                self.job.merged[rank] = max(step, self.job.merged.get(rank, 0))


def decisions_of(job: JobMemory) -> Decisions:
    """What is decided in a job of this rule."""
    rule = job.rule or {"name": ""}
    if rule["name"] == "merge":
        return Merge(job, rule["quorum"], rule["grace"])
    if rule["name"] == "apply" and rule["max_staleness"] is not None:
        return Bound(job)
    return Decisions(job)
