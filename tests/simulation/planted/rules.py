"""Bugs of the rules of chunks, and of what a shard does with views and releases."""

from __future__ import annotations

from dataclasses import replace

from psengine.parameter_server.server.rules.answer_memory import Place
from psengine.parameter_server.server.rules.apply import Apply
from psengine.parameter_server.server.rules.average import Average
from psengine.parameter_server.server.rules.contribution_set import ContributionSet
from psengine.parameter_server.server.rules.delay_compensation import DelayCompensation
from psengine.parameter_server.server.rules.merge import Merge
from psengine.parameter_server.server.rules.payloads import ChunkPayloads
from psengine.parameter_server.server.shard.job import Job
from psengine.parameter_server.server.shard.shard import Shard
from psengine.protocol.layout import ChunkKind
from simulation.planted.registry import after, constant, keeping, plant, then

# ---- average ---------------------------------------------------------------------------------------------------------

_AS_THEY_CAME = property(lambda self: [one for one in self.by_rank.values() if one.values is not None])
plant("the order of ranks is lost", ContributionSet, "given", value=_AS_THEY_CAME)
plant("contributions to steps of a former view stay", Average, "adopt", keeping("_open"))
plant("averages of steps that a view takes back stay", Average, "adopt", keeping("_results"))
plant("a view takes back averages of earlier steps", Average, "adopt", then(lambda average: average._results.clear()))
plant("the average that a donor returns is dropped", Average, "supply_result", constant([]))


@plant("an average of nobody is zeros", ContributionSet, "combine")
def _give_zeros(combine, self, memory):
    if self.given:
        return combine(self, memory)
    place = memory()
    place.values.zero_()
    return place


@plant("buffers are those of who came first", ContributionSet, "combine")
def _take_first(combine, self, memory):
    first = next(iter(self.by_rank.values()))
    return Place(first.values.clone()) if self._spec.kind is ChunkKind.BUFFER else combine(self, memory)


@plant("a usage map says whether, and not by how many", ContributionSet, "combine")
def _take_maps_for_flags(combine, self, memory):
    place = combine(self, memory)
    if self._spec.kind is ChunkKind.USAGE:
        place.values.clamp_(max=1)
    return place


@plant("a gradient's weight is forgotten", ContributionSet, "_combine_weighted")
def _forget_weights(combine, self, tensors, weights):
    return combine(self, tensors, [1.0] * len(weights))


def _forget_oldest(average):
    if average._results:
        del average._results[min(average._results)]


@plant("a view takes back a step, and not what its average left out", Average, "adopt")
def _keep_residual(adopt, self, view):
    state = self._state
    replies = adopt(self, view)
    self._state = state
    return replies


@plant("what an average left out is dropped", ChunkPayloads, "encode")
def _begin_with_zeros(encode, self, values, state=None):
    return encode(self, values, None if state is None else self.make_state())


plant("averages are forgotten one step too early", Average, "_answers", then(_forget_oldest))

# ---- apply -----------------------------------------------------------------------------------------------------------

plant("a push that is here is taken for a new one", Apply, "has", constant(False))
plant("a held answer never leaves", Apply, "release", constant([]))
plant("a lost answer is not answered again", Apply, "answer_again", constant(None))
plant("a stale gradient is corrected twice", DelayCompensation, "correct", after(lambda gradient: gradient * 2))
plant("a first gradient is not corrected", Apply, "note_base", constant(False))


@plant("the staleness bound is off by one", Apply, "_is_held")
def _hold_less(held, self, known):
    return held(self, replace(known, step=known.step - 1))


@plant("every fifth update is acknowledged and dropped", Apply, "_step")
def _drop_every_fifth(step, self, values, given, *options):
    if (self.version + 1) % 5:
        step(self, values, given, *options)
    else:
        self.version += 1


@plant("a new process counts for its predecessor", Apply, "adopt")
def _keep_steps(adopt, self, view):
    former = {rank: known.step for rank, known in self.workers.items()}
    replies = adopt(self, view)
    for rank, step in former.items():
        self.workers[rank].step = max(self.workers[rank].step, step)
    return replies


@plant("a shard thinks that a worker holds something else", ChunkPayloads, "next_held")
def _add_one(next_held, *arguments, **options):
    held = next_held(*arguments, **options)
    held.values.add_(1.0)
    return held


# ---- merge -----------------------------------------------------------------------------------------------------------

plant("a merge does not wait for a contribution that is named", Merge, "_missing_from", constant([]))
plant("a merged contribution is taken for a new one", Merge, "has", constant(False))


@plant("a merge takes what nobody named", Merge, "_merge")
def _merge_all(merge, self, number, pairs):
    return merge(self, number, tuple((rank, one.step) for rank, one in sorted(self.here.items())))


@plant("a merge leaves its contributions for the next", Merge, "_merge")
def _merge_again(merge, self, number, pairs):
    here = dict(self.here)
    replies = merge(self, number, pairs)
    self.here.update(here)
    return replies


# ---- shards ----------------------------------------------------------------------------------------------------------

plant("a shard takes no release twice, nor a newer one", Job, "release", constant([]))


@plant("a shard adopts a view that is older than its own", Shard, "_view")
def _adopt_all(view, self, job, message, sender):
    known, job.view = job.view, None
    outgoing = view(self, job, message, sender)
    job.view = job.view or known
    return outgoing


@plant("a shard says that it lacks nothing", Job, "resume")
def _miss_nothing(resume, self, rank, pushes):
    return [], resume(self, rank, pushes)[1]


@plant("a shard takes whoever knows a rank and an incarnation for the member", Job, "is_from_member")
def _believe_incarnation(is_from, self, message, sender):
    return self.is_member(message.worker, message.incarnation)


plant("a run that names other servers replaces what was trained", Job, "check_place", constant(None))


@plant("a newer registration replaces what was trained", Job, "check_place")
def _take_for_older(check, self, body):
    check(self, body | {"registration": min(body["registration"], self.registration)})
