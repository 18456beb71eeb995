"""Bugs of coordinators: who takes part, and what is decided."""

from __future__ import annotations

from typing import Any
from unittest import mock

from psengine.parameter_server.server.coordinator import coordinator as module
from psengine.parameter_server.server.coordinator.claims import Claims
from psengine.parameter_server.server.coordinator.coordinator import Coordinator
from psengine.parameter_server.server.coordinator.decisions import Bound, Merge
from psengine.parameter_server.server.coordinator.states import JobMemory, JobState
from psengine.parameter_server.server.coordinator.workers import Workers
from psengine.protocol.messages import MessageType
from simulation.planted.registry import Bug, after, constant, plant, then, with_patch

# ---- who takes part --------------------------------------------------------------------------------------------------


def _with_view(**changes: Any) -> Bug:
    """Views have other fields: functions of what they had."""

    def publish_changed(publish, self, newcomers):
        view = module.View

        def changed(*arguments, **fields):
            return view(*arguments, **fields | {name: change(fields[name]) for name, change in changes.items()})

        with mock.patch.object(module, "View", changed):
            publish(self, newcomers)

    return publish_changed


plant("a view begins one step too late", Coordinator, "_publish", _with_view(from_step=lambda step: step + 1))
plant("a view begins one step too early", Coordinator, "_publish", _with_view(from_step=lambda step: max(1, step - 1)))
plant("nobody returns the average that some lack", Coordinator, "_publish", _with_view(donor=lambda donor: None))
plant("a view has no decisions", Coordinator, "_publish", _with_view(releases=lambda releases: ()))
plant("a view does not wait for what members have completed", Coordinator, "_unprepared", constant([]))
plant("a worker may leave at once", module, "may_leave", constant(True))
plant("no lease ever ends", Coordinator, "_put_out_silent", constant(None))
plant("a lease ends though nobody is heard", Coordinator, "_others_outlast", constant(True))
plant("a restarted shard is not heard of", Coordinator, "_hear_life", constant(None))
plant("who is cut off from a shard stays", Coordinator, "_put_out_cut_off", constant(None))
plant("no donor is asked", Coordinator, "_ask_donor", constant(None))
plant("views do not grow", Coordinator, "_next_number", after(lambda number: max(1, number - 1)))
plant("a run goes on unasked from what another has trained", Coordinator, "_turn_away", constant(None))
plant("a coordinator that resumes begins with whoever is back", Coordinator, "_expect", constant(None))


@plant("a life whose clock was set back is never believed", Coordinator, "_hear_life")
def _believe_higher_lives(hear, self, worker, message):
    known = dict(enumerate(self.epochs))
    if message.body["epoch"] >= known.get(message.body["shard"], 0):
        hear(self, worker, message)


@plant("another process is taken for the one that has the rank", Coordinator, "_hello")
def _take_over(hear, self, message, sender):
    holder = self.workers.by_rank.get(message.body.get("rank"))
    if holder is not None:
        holder.nonce = message.body["nonce"]
    hear(self, message, sender)


@plant("a new process gets its predecessor's number", Workers, "new")
def _use_incarnation_again(new, self, rank, message, user_id, wall_s):
    known = self.by_rank.get(rank)
    worker = new(self, rank, message, user_id, wall_s)
    worker.incarnation = worker.incarnation if known is None else known.incarnation
    return worker


def _begin_early(coordinator):
    if coordinator._donation is not None:
        coordinator._donation = coordinator._donation[0], coordinator._donation[1] - 1


plant("a joiner begins one step too early", Coordinator, "_hear_donated", then(_begin_early))


def _forget_a_registration(self):
    if self.state is JobState.NEW:
        self.key = b""


plant("a restarted lead forgets who may have registered its job", Coordinator, "restore", then(_forget_a_registration))

# ---- decisions -------------------------------------------------------------------------------------------------------


def _need_less(init, self, job, quorum, *arguments):
    init(self, job, max(1, quorum - 1), *arguments)


def _count_absent(commit, self, worker, step, *, abstained, now_s):
    return commit(self, worker, step, abstained=False, now_s=now_s)


plant("a merge's quorum is one too small", Merge, "__init__", _need_less)
plant("workers without a difference are merged", Merge, "commit", _count_absent)
plant("a grace window never ends", Merge, "_is_over", constant(False))


@plant("the fastest worker is the floor", Bound, "decide")
def _follow_the_fastest(decide, self, now_s):
    fastest = max((one.committed for one in self.members), default=0)
    with mock.patch.object(self, "_least", return_value=fastest):
        return decide(self, now_s)


plant("a bound forgets who never came", Bound, "decide", with_patch(JobMemory, "missing", []))


@plant("decisions go to worker 0 alone", Coordinator, "_send")
def _tell_worker_0(send, self, worker, message):
    return None if message.type is MessageType.RELEASE and worker.rank else send(self, worker, message)


# ---- claims ----------------------------------------------------------------------------------------------------------


@plant("a view's number counts before the key is looked at", Claims, "judge")
def _believe_number(judge, self, message, sender, now_s):
    self._job.last_number = max(self._job.last_number, message.body.get("view", 0))
    return judge(self, message, sender, now_s)


@plant("whoever has lost a job is believed under any key", Claims, "_refuse_other_life")
def _believe_loss(refuse, self, rule):
    self._job._lost = "the weights are lost"
    refuse(self, rule)


@plant("a coordinator takes whoever knows a rank and an incarnation for its member", Workers, "find")
def _believe_incarnation(find, self, message, sender, job):
    worker = self.by_rank.get(message.worker)
    return (
        worker if worker is not None and worker.incarnation == message.incarnation else find(self, message, sender, job)
    )


plant("a coordinator that lacks a view does not ask for it", Claims, "_lacks", constant(False))
