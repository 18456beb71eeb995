"""Bugs of the rules of chunks, and of what a shard does with views and releases."""

from __future__ import annotations

from typing import Any

from psengine.parameter_server.server.rules import apply
from psengine.parameter_server.server.rules.apply import Apply
from psengine.parameter_server.server.rules.average import Average
from psengine.parameter_server.server.rules.contribution_set import ContributionSet
from psengine.parameter_server.server.rules.delay_compensation import DelayCompensation
from psengine.parameter_server.server.rules.held_weights import HeldWeights
from psengine.parameter_server.server.rules.merge import Merge
from psengine.parameter_server.server.shard.job import Job
from psengine.parameter_server.server.shard.shard import Shard
from simulation.planted.registry import after, constant, keeping, plant, then

# ---- average ---------------------------------------------------------------------------------------------------------


def _without_late(answer: Any) -> Any:
    def one(self: Average, rank: int, step: int) -> Any:
        reply = answer(self, rank, step)
        reply.body.pop("late", None)
        return reply

    return one


def _forget_oldest(average: Average) -> None:
    if average._results:
        del average._results[min(average._results)]


plant(
    "the order of ranks is lost",
    ContributionSet,
    "given",
    lambda given: property(lambda self: [one for one in self.by_rank.values() if one.values is not None]),
)
plant(
    "a gradient's weight is forgotten",
    ContributionSet,
    "_combine_weighted",
    lambda combine: lambda self, tensors, weights: combine(self, tensors, [1.0] * len(weights)),
)
plant("contributions to steps of a former view stay", Average, "adopt", keeping("_open"))
plant("averages of steps that a view takes back stay", Average, "adopt", keeping("_results"))
plant("a view takes back averages of earlier steps", Average, "adopt", then(lambda average: average._results.clear()))
plant("a late gradient is said to count", Average, "_answer", _without_late)
plant("averages are forgotten one step too early", Average, "_answers", then(_forget_oldest))
plant("the average that a donor returns is dropped", Average, "supply_result", constant([]))
plant("a shard ignores who counts in a step", Average, "release", constant([]))

# ---- apply -----------------------------------------------------------------------------------------------------------


def _drops_every_fifth(step: Any) -> Any:
    def one(self: Apply, values: Any, given: Any, *options: Any) -> None:
        if (self.version + 1) % 5:
            step(self, values, given, *options)
        else:
            self.version += 1

    return one


def _keeps_steps(adopt: Any) -> Any:
    def one(self: Apply, view: Any) -> Any:
        former = {rank: known.step for rank, known in self.workers.items()}
        replies = adopt(self, view)
        for rank, step in former.items():
            self.workers[rank].step = max(self.workers[rank].step, step)
        return replies

    return one


def _add_one(held: HeldWeights) -> HeldWeights:
    held.values.add_(1.0)
    return held


plant("every fifth update is acknowledged and dropped", Apply, "_step", _drops_every_fifth)
plant("a push that is here is taken for a new one", Apply, "has", constant(False))
plant("the staleness bound is off by one", Apply, "_is_held", lambda held: lambda self, step: held(self, step - 1))
plant("a held answer never leaves", Apply, "release", constant([]))
plant("a new process counts for its predecessor", Apply, "adopt", _keeps_steps)
plant("a lost answer is not answered again", Apply, "answer_again", constant(None))
plant("a stale gradient is corrected twice", DelayCompensation, "correct", after(lambda gradient: gradient * 2))
plant("a shard thinks that a worker holds something else", apply, "next_held", after(_add_one))

# ---- merge -----------------------------------------------------------------------------------------------------------


def _merges_all(merge: Any) -> Any:
    def one(self: Merge, number: int, pairs: Any) -> Any:
        return merge(self, number, tuple((rank, one.step) for rank, one in sorted(self.here.items())))

    return one


def _merges_again(merge: Any) -> Any:
    def one(self: Merge, number: int, pairs: Any) -> Any:
        here = dict(self.here)
        replies = merge(self, number, pairs)
        self.here.update(here)
        return replies

    return one


plant("a merge takes what nobody named", Merge, "_merge", _merges_all)
plant("a merge leaves its contributions for the next", Merge, "_merge", _merges_again)
plant("a merge does not wait for a contribution that is named", Merge, "_missing_from", constant([]))
plant("a merged contribution is taken for a new one", Merge, "has", constant(False))

# ---- shards ----------------------------------------------------------------------------------------------------------


def _adopts_all(view: Any) -> Any:
    def one(self: Shard, job: Job, message: Any, sender: Any) -> Any:
        known, job.view = job.view, None
        outgoing = view(self, job, message, sender)
        job.view = job.view or known
        return outgoing

    return one


def _misses_nothing(resume: Any) -> Any:
    return lambda self, rank, pushes: ([], resume(self, rank, pushes)[1])


plant("a shard adopts a view that is older than its own", Shard, "_view", _adopts_all)
plant("a shard says that it lacks nothing", Job, "resume", _misses_nothing)
plant("a shard takes no release twice, nor a newer one", Job, "release", constant([]))
