"""What the coordinator decides once a step for all chunks, by counting workers' COMMITs. Pure.

    bound    the floor: the step that every worker has committed; nobody gets answers of steps that are too far above it
    quorum   whose contributions make the average of a step
    merge    whose contributions make the next merge

A job without such a rule has ``Decisions``, which decides nothing. Workers are (rank, incarnation).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from typing_extensions import override

from psengine.parameter_server.server.coordinator.grace import GraceWindow
from psengine.parameter_server.server.coordinator.workers import Worker
from psengine.protocol.views import Release

# With a quorum, nobody is more steps ahead of the slowest member: what shards keep for it is bounded.
HISTORY = 8
Identity = tuple[int, int]


class Draft(NamedTuple):
    """A decision; see ``Release``."""

    step: int
    contributors: tuple[tuple[int, int], ...] | None = None
    floor: int | None = None


class Decisions:
    """See the module's text.

    Attributes:
        is_durable: what was decided has to be on the disk; else it is decided anew after a restart.
        durable: attributes that have to.
        members: of the view.
    """

    is_durable = False
    durable: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.members: dict[Identity, Worker] = {}
        self._missing: list[int] = []

    def adopt(self, members: Sequence[Worker], from_step: int, missing: list[int]) -> None:
        """A view was published; ``missing``: ranks that the job is to have and that never came."""
        self.members, self._missing = {one.identity: one for one in members}, missing
        for one in members:  # what a worker has the answers to, it has committed, perhaps to a former coordinator
            one.committed = max(one.committed, one.first_step - 1, one.completed)

    def commit(self, worker: Worker, step: int, *, abstained: bool, now_s: float) -> None:
        """Every shard has a member's pushes of a step; said again it changes nothing."""
        worker.committed = max(worker.committed, step)

    def due(self, now_s: float) -> list[Draft]:
        """What is decided now."""
        return []

    def first_step(self, worker: Worker) -> int:
        """Of a worker that comes, where servers hold the weights."""
        return worker.completed + 1

    def waiting_for(self) -> list[int]:
        """Ranks without which nothing is decided now."""
        return []

    def outstanding(self, releases: Sequence[Release], members: Sequence[Worker]) -> list[Release]:
        """Those of these releases that some shard may not have."""
        return []

    def learn(self, releases: Sequence[Release], members: Sequence[Worker]) -> None:
        """These were decided by a former coordinator."""

    def to_meta(self) -> dict[str, Any]:
        """For the disk."""
        return {name: getattr(self, name) for name in self.durable}

    def restore(self, meta: Mapping[str, Any]) -> None:
        """Inverse of ``to_meta``."""
        for name in self.durable:
            setattr(self, name, meta[name])

    def _least(self) -> int:
        return min((one.committed for one in self.members.values()), default=0)


class Bound(Decisions):
    """Nobody is more than a bound ahead of the slowest worker; one that never came has committed nothing."""

    durable = ("floor",)

    def __init__(self) -> None:
        super().__init__()
        self.floor = 0

    @override
    def due(self, now_s: float) -> list[Draft]:
        least = 0 if self._missing else self._least()
        if least <= self.floor:
            return []
        self.floor = least
        return [Draft(least, floor=least)]

    @override
    def first_step(self, worker: Worker) -> int:
        return max(worker.completed, self.floor) + 1

    @override
    def waiting_for(self) -> list[int]:
        least = self._least()
        return [one.rank for one in self.members.values() if one.committed == least] + self._missing

    @override
    def outstanding(self, releases: Sequence[Release], members: Sequence[Worker]) -> list[Release]:
        return list(releases[-1:])

    @override
    def learn(self, releases: Sequence[Release], members: Sequence[Worker]) -> None:
        self.floor = max([self.floor, *(one.floor or 0 for one in releases)])


class Quorum(Decisions):
    """A step's average has the contributions that ``quorum`` workers committed first."""

    def __init__(self, quorum: int) -> None:
        super().__init__()
        self._quorum = quorum
        self._from_step = 1
        # step -> worker -> whether it abstained; of steps that are not decided
        self._steps: dict[int, dict[Identity, bool]] = {}
        self._decided: set[int] = set()

    @override
    def adopt(self, members: Sequence[Worker], from_step: int, missing: list[int]) -> None:
        """Shards forget steps from ``from_step`` on: workers push and commit them again."""
        super().adopt(members, from_step, missing)
        self._from_step = from_step
        # Who lacks an older step has it as good as committed: it was decided without it, or with it.
        for one in members:
            one.committed = min(max(one.first_step - 1, one.completed), from_step - 1)
        self._steps.clear()
        self._decided = {step for step in self._decided if step < from_step}

    @override
    def commit(self, worker: Worker, step: int, *, abstained: bool, now_s: float) -> None:
        super().commit(worker, step, abstained=abstained, now_s=now_s)
        if step >= self._from_step and step not in self._decided:
            self._steps.setdefault(step, {})[worker.identity] = abstained

    @override
    def due(self, now_s: float) -> list[Draft]:
        slowest = self._least()
        drafts = []
        for step, said in sorted(self._steps.items()):
            given = sorted(worker for worker, abstained in said.items() if not abstained)
            are_all = all(one in said for one, worker in self.members.items() if worker.first_step <= step)
            if (len(given) < self._quorum and not are_all) or step - slowest > HISTORY:
                continue
            del self._steps[step]
            self._decided = {one for one in self._decided if one > slowest} | {step}
            drafts.append(Draft(step, tuple((rank, step) for rank, _ in given)))
        return drafts

    @override
    def waiting_for(self) -> list[int]:
        step = min(self._steps, default=0)
        return [one.rank for one in self.members.values() if one.committed < step]

    @override
    def outstanding(self, releases: Sequence[Release], members: Sequence[Worker]) -> list[Release]:
        least = min((one.completed for one in members), default=0)
        return [one for one in releases if one.step > least]


class Merge(Decisions):
    """Workers go at their own pace; a merge has what a quorum, and who came in the grace window, brought.

    A worker that abstained last is not waited for until it has brought something again.
    """

    is_durable = True
    durable = ("count", "last_step")

    def __init__(self, quorum: int, grace: float) -> None:
        super().__init__()
        self.count = 0
        self.last_step = 0  # of any contribution that was merged
        self._quorum = quorum
        self._window = GraceWindow(grace)
        self._has_quorum = False

    @override
    def adopt(self, members: Sequence[Worker], from_step: int, missing: list[int]) -> None:
        for one in self.members.values():
            if one not in members:
                self._window.forget(one.rank)
                one.pending, one.is_idle = 0, False
        super().adopt(members, from_step, missing)

    @override
    def commit(self, worker: Worker, step: int, *, abstained: bool, now_s: float) -> None:
        if step <= max(worker.merged, worker.pending):
            return
        worker.is_idle = abstained
        if abstained:
            worker.merged = step
        else:
            worker.pending = step
            self._window.arrived(worker.rank, now_s)

    def _absent(self) -> list[int]:
        """Ranks whose contribution may come."""
        return [one.rank for one in self.members.values() if not one.pending and not one.is_idle]

    @override
    def due(self, now_s: float) -> list[Draft]:
        here, absent = [one for one in self.members.values() if one.pending], self._absent()
        # Where fewer are left than the quorum, these are all that it can have.
        if not here or len(here) < min(self._quorum, len(here) + len(absent) + len(self._missing)):
            self._has_quorum = False
            return []
        if not self._has_quorum:
            self._has_quorum = True
            self._window.open([one.rank for one in here], absent, now_s)
        if not self._window.is_over(absent, now_s):
            return []
        contributors = tuple((one.rank, one.pending) for one in here)
        for one in here:
            one.merged, one.pending = max(one.merged, one.pending), 0
        self._has_quorum = False
        self.count += 1
        self.last_step = max(self.last_step, *(step for _, step in contributors))
        return [Draft(self.count, contributors)]

    @override
    def first_step(self, worker: Worker) -> int:
        return max(worker.completed, self.last_step) + 1

    @override
    def waiting_for(self) -> list[int]:
        return self._absent() + self._missing if any(one.pending for one in self.members.values()) else []

    @override
    def outstanding(self, releases: Sequence[Release], members: Sequence[Worker]) -> list[Release]:
        """Shards apply merges in order, so whoever has the answer to one proves that all have it, and all before."""
        has = {one.rank: range(one.first_step, one.completed + 1) for one in members}
        taken = [
            one.number for one in releases if any(step in has.get(rank, ()) for rank, step in one.contributors or ())
        ]
        return [one for one in releases if one.number > max(taken, default=0)]

    @override
    def learn(self, releases: Sequence[Release], members: Sequence[Worker]) -> None:
        by_rank = {one.rank: one for one in members}
        for release in releases:
            self.count = max(self.count, release.step)
            for rank, step in release.contributors or ():
                self.last_step = max(self.last_step, step)
                if rank in by_rank:
                    by_rank[rank].merged = max(step, by_rank[rank].merged)


def decisions_of(rule: Mapping[str, Any]) -> Decisions:
    """What is decided in a job of this rule."""
    if rule["name"] == "merge":
        return Merge(rule["quorum"], rule["grace"])
    if rule["name"] == "average" and rule["quorum"] is not None:
        return Quorum(rule["quorum"])
    if rule["name"] == "apply" and rule["max_staleness"] is not None:
        return Bound()
    return Decisions()
