"""Bugs of jobs whose workers exchange among themselves: of the coordinator, of membership, player and parts."""

from __future__ import annotations

import math
from dataclasses import replace

from psengine.errors import CollectiveError
from psengine.parameter_server.client.elastic import ElasticClient
from psengine.parameter_server.server.coordinator import elastic as coordinator
from psengine.parameter_server.server.coordinator.elastic import ElasticCoordinator
from psengine.strategies.elastic.coordinated import CoordinatedMembership
from psengine.strategies.elastic.guarded import GuardedWork
from psengine.strategies.elastic.player import Player
from psengine.strategies.elastic.state import StateRegistry
from psengine.strategies.elastic.sync import SyncVirtualWorkers
from psengine.tensors import documents
from simulation.planted.registry import constant, plant

# ---- who has what ----------------------------------------------------------------------------------------------------


@plant("an elastic worker takes a step twice whose averages another one gave it", Player, "_meet")
def _step_again(meet, self, group):
    completed = self.completed
    meet(self, group)
    if completed is not None:
        self.completed = completed


@plant("an elastic worker says that it has averages which have not come", Player, "_exchange")
def _claim_averages(exchange, self, step):
    try:
        exchange(self, step)
    except CollectiveError:
        self.completed = step
        raise


@plant("an elastic newcomer is a source before it has all of the state", Player, "_meet")
def _claim_state(meet, self, group):
    try:
        meet(self, group)
    except CollectiveError:
        if self.completed is None:
            self.completed = max(member.completed or 0 for member in group.members)
        raise


plant("an elastic worker leaves while others lack its averages", coordinator, "may_leave", constant(True))
plant("an elastic newcomer keeps its initial values", StateRegistry, "install", constant(None))


@plant("the order of buckets is not told", SyncVirtualWorkers, "progress")
def _no_orders(progress, self):
    return progress(self) | {"order": None}


@plant("who gets averages from another keeps its own records", Player, "_take_averages")
def _keep_records(take, self, collective, source, newest):
    records = self.recorded
    take(self, collective, source, newest)
    self.recorded = records


plant("a damaged checkpoint is taken for a whole one", documents, "_digest", constant(""))


@plant("nobody is expected back at an elastic coordinator that restarts", ElasticCoordinator, "__init__")
def _be_old(init, self, name, interfaces):
    init(self, name, replace(interfaces, started_s=-math.inf))


# ---- who plays whom --------------------------------------------------------------------------------------------------


@plant("each elastic worker deals by what it knows itself", Player, "_deal")
def _deal_by_own(deal, self, group, former):
    deal(self, group, self._owners)


@plant("what is in a slot counts for whoever gets the slot", Player, "_deal")
def _keep_slots(deal, self, group, former):
    done = {self._slots[v]: value for v, value in self._done.items()}
    deal(self, group, former)
    self._done = {v: done[slot] for v, slot in self._slots.items() if slot in done}


@plant("contributions are not moved with their virtual workers", SyncVirtualWorkers, "move")
def _leave_contributions(move, self, group, owners, kept):
    move(self, group, owners, {})


plant("a batch begins with the buffers of the one before", SyncVirtualWorkers, "_restore", constant(None))


@plant("buffers stay those of the worker's own last batch", SyncVirtualWorkers, "_share_buffers")
def _keep_buffers(_, self):
    return self._copied_buffers()


# ---- groups ----------------------------------------------------------------------------------------------------------


@plant("exchanges stay in the former group", SyncVirtualWorkers, "move")
def _stay(move, self, group, owners, kept):
    former = self._group
    move(self, group, owners, kept)
    if former.world_size == group.world_size:
        self._group = former


@plant("nobody says that a group has failed", CoordinatedMembership, "_next_group")
def _say_nothing(next_group, self, *, has_failed=False):
    return next_group(self)


plant("exchanges go on though a view is prepared", GuardedWork, "wait", lambda wait, self, *_: self._work.wait())
plant("an elastic worker keeps PREPARE to itself", ElasticClient, "prepare", constant(None))


@plant("an elastic coordinator hears that a step has ended and forgets it", ElasticCoordinator, "_hear_prepared")
def _forget_completed(hear, self, worker, message):
    completed = worker.completed
    hear(self, worker, message)
    worker.completed = completed


plant("members meet under a view of a former life", ElasticCoordinator, "_meeting", lambda meeting, self: self.view)
