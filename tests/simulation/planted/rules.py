"""Bugs of the rules of chunks, and of what a shard does with views and releases."""

from __future__ import annotations

from typing import Any

from psengine.parameter_server.server.rules.apply import Apply
from psengine.parameter_server.server.rules.average import Average
from psengine.parameter_server.server.rules.contribution_set import ContributionSet
from psengine.parameter_server.server.rules.delay_compensation import DelayCompensation
from psengine.parameter_server.server.rules.held_weights import HeldWeights
from psengine.parameter_server.server.rules.merge import Merge
from psengine.parameter_server.server.rules.server_weights import ServerWeights
from psengine.parameter_server.server.shard.job import Job
from psengine.parameter_server.server.shard.shard import Shard
from psengine.protocol.messages import Message
from psengine.protocol.views import View
from simulation.planted.registry import after, constant, plant

# ---- average ---------------------------------------------------------------------------------------------------------

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


def _keeps_open_steps(adopt: Any) -> Any:
    def one(self: Average, view: View) -> Any:
        kept = dict(self._open)
        replies = adopt(self, view)
        self._open = kept | self._open
        return replies

    return one


def _keeps_results(adopt: Any) -> Any:
    def one(self: Average, view: View) -> Any:
        kept = dict(self._results)
        replies = adopt(self, view)
        self._results = kept | self._results
        return replies

    return one


def _takes_all_back(adopt: Any) -> Any:
    def one(self: Average, view: View) -> Any:
        replies = adopt(self, view)
        self._results.clear()
        return replies

    return one


def _without_late(answer: Any) -> Any:
    def one(self: Average, rank: int, step: int) -> Any:
        reply = answer(self, rank, step)
        reply.body.pop("late", None)
        return reply

    return one


def _one_too_early(forget: Any) -> Any:
    def one(self: Average) -> None:
        forget(self)
        if self._results:
            del self._results[min(self._results)]

    return one


plant("contributions to steps of a former view stay", Average, "adopt", _keeps_open_steps)
plant("averages of steps that a view takes back stay", Average, "adopt", _keeps_results)
plant("a view takes back averages of earlier steps", Average, "adopt", _takes_all_back)
plant("a late gradient is said to count", Average, "_answer", _without_late)
plant("averages are forgotten one step too early", Average, "_forget_answered", _one_too_early)
plant("the average that a donor returns is dropped", Average, "supply_result", constant([]))
plant("a shard ignores who counts in a step", Average, "release", constant([]))

# ---- apply -----------------------------------------------------------------------------------------------------------


def _drops_every_fifth(step: Any) -> Any:
    def one(self: ServerWeights, values: Any, given: Any) -> None:
        if (self.version + 1) % 5:
            step(self, values, given)
        else:
            self.version += 1

    return one


def _off_by_one(is_held: Any) -> Any:
    return lambda self, step: is_held(self, step - 1)


def _forgets_who_left(adopt: Any) -> Any:
    def one(self: Apply, view: View) -> Any:
        replies = adopt(self, view)
        members = {member.rank for member in view.members}
        self._taken = {rank: known for rank, known in self._taken.items() if rank in members}
        return replies

    return one


def _keeps_predecessors(adopt: Any) -> Any:
    def one(self: Apply, view: View) -> Any:
        taken = dict(self._taken)
        replies = adopt(self, view)
        self._taken = taken | self._taken
        return replies

    return one


def _adds_once_more(encode: Any) -> Any:
    def one(self: HeldWeights, rank: int, *arguments: Any, repeated: bool) -> Any:
        held = self._held.get(rank)
        found = encode(self, rank, *arguments, repeated=repeated)
        if held is not None:
            held.values.add_(1.0)
        return found

    return one


plant("every fifth update is acknowledged and dropped", ServerWeights, "_step", _drops_every_fifth)
plant("a push that is here is taken for a new one", Apply, "has", constant(False))
plant("the staleness bound is off by one", Apply, "_is_held", _off_by_one)
plant("a held answer never leaves", Apply, "release", constant([]))
plant("a shard forgets the steps of a worker that is put out", Apply, "adopt", _forgets_who_left)
plant("a new process counts for its predecessor", Apply, "adopt", _keeps_predecessors)
plant("a lost answer is not answered again", Apply, "answer_again", constant(None))
plant("a stale gradient is corrected twice", DelayCompensation, "correct", after(lambda gradient: gradient * 2))
plant("a shard thinks that a worker holds something else", HeldWeights, "answer", _adds_once_more)
plant("nobody asks what a worker holds", HeldWeights, "note", constant(None))

# ---- merge -----------------------------------------------------------------------------------------------------------


def _merges_all(merge: Any) -> Any:
    def one(self: Merge, number: int, pairs: Any) -> Any:
        return merge(self, number, tuple((rank, one.step) for rank, one in sorted(self._gathered.by_rank.items())))

    return one


def _merges_again(merge: Any) -> Any:
    def one(self: Merge, number: int, pairs: Any) -> Any:
        here = dict(self._gathered.by_rank)
        replies = merge(self, number, pairs)
        self._gathered.by_rank.update(here)
        return replies

    return one


plant("a merge takes what nobody named", Merge, "_merge", _merges_all)
plant("a merge leaves its contributions for the next", Merge, "_merge", _merges_again)
plant("a merge does not wait for a contribution that is named", Merge, "_missing_from", constant([]))
plant("a merged contribution is taken for a new one", Merge, "has", constant(False))

# ---- shards ----------------------------------------------------------------------------------------------------------


def _adopts_all(view: Any) -> Any:
    def one(self: Shard, job: Job, message: Message, sender: Any) -> Any:
        known, job.view = job.view, None
        outgoing = view(self, job, message, sender)
        job.view = job.view or known
        return outgoing

    return one


def _misses_nothing(resume: Any) -> Any:
    return lambda self, rank, pushes: ([], resume(self, rank, pushes)[1])


plant("a shard adopts a view that is older than its own", Shard, "_view", _adopts_all)
plant(
    "a shard that restarted takes pushes under its old view",
    Shard,
    "_is_current",
    lambda _: lambda self, job: job.view is not None,
)
plant("a shard says that it lacks nothing", Job, "resume", _misses_nothing)
plant(
    "a shard takes a release twice", Job, "release", lambda release: lambda self, one: _anew(self) or release(self, one)
)


def _anew(job: Job) -> None:
    job.taken = 0
