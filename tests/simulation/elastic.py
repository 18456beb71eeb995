"""A job whose workers exchange among themselves, under virtual workers, and its oracle.

Whoever has completed a step has the weights, momentum, buffers, schedule and records of a plain process that plays all
virtual workers, from the same initial values. A buffer says whose these are.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from psengine.errors import PSEngineError, ServerRefusedError
from psengine.protocol.messages import ErrorCode, Message, MessageType
from psengine.protocol.views import View, view_of
from psengine.strategies.elastic.player import Player
from simulation.disk import SimulatedDisk
from simulation.elastic_model import MOMENTUM, Batches, Reference, Trainee
from simulation.elastic_worker import ElasticProcess, SimulatedMembership
from simulation.job import Job
from simulation.violation import require

PAUSE = 0.1  # between two buckets, of what a batch takes
# Where nothing else happens, nobody who lives is evicted: members of a view have a lease to come back to a server.
DEATHS = {"kill lead", "kill worker", "kill workers", "checkpoint fails", "bits of a checkpoint flip"}


class ElasticJob(Job):
    """See the module's text."""

    def __init__(self, world) -> None:
        super().__init__(world)
        scenario = self.scenario
        self.specs, self.rule = [], {}
        self._batches = Batches(scenario.seed, scenario.steps, scenario.virtual_workers)
        self._references: dict[int, Reference] = {}
        self._disks: dict[int, SimulatedDisk] = {}
        self._written: dict[int, int] = {}  # by disk, the newest checkpoint that must be there
        self._changes: Counter[int] = Counter()  # by disk, how often somebody has written to it
        self._seen: dict[int, int] = {}  # by process, how often until it said which checkpoint it has
        self._views: set[tuple[int, int]] = set()
        self._members: set[tuple[int, int]] = set()

    def random_s(self, longest_s: float) -> float:
        """Some time."""
        return longest_s * self._rng.random()

    def disk_of(self, rank: int) -> SimulatedDisk:
        """Where a worker keeps its checkpoints."""
        place = self._place_of(rank)
        if place not in self._disks:
            self._disks[place] = SimulatedDisk(self._rng)
            self._disks[place].directory = Path()  # type: ignore[attr-defined]
        return self._disks[place]

    def _place_of(self, rank: int) -> int:
        """The number of the disk that a worker has; they may share one."""
        return 0 if self.scenario.shares_checkpoints else rank

    # ---- a worker ----------------------------------------------------------------------------------------------

    def train(self, process: ElasticProcess) -> None:
        """The user's program; runs in the process's thread."""
        scenario = self.scenario
        membership = SimulatedMembership(process, scenario.virtual_workers)
        process.player = player = Player(scenario.virtual_workers, membership)
        trainee = Trainee(player, process.number)
        if scenario.checkpoint_steps:
            player.checkpoint_every(scenario.checkpoint_steps, ".")
        try:
            step = player.enter({"seed": str(scenario.seed)})
            while step <= scenario.steps:
                self._step(process, trainee, step)
                step += 1
            process.is_leaving = True
            player.leave()
        except PSEngineError:
            membership.close()
            raise
        except FileNotFoundError:  # others that share the directory, or a zombie, went on, and left newer ones
            are_newer = self._changes[self._place_of(process.rank)] > self._seen[process.number]
            require(are_newer, "worker {} has lost a checkpoint", process.rank)
            self.world.counts["checkpoint gone"] += 1
            membership.close()
            self.world.clock.after(0.0, process.kill)
            process.park(lambda: False)
        self._check(process, trainee, scenario.steps)
        self._check_left(process)

    def _step(self, process: ElasticProcess, trainee: Trainee, step: int) -> None:
        player, batches, think_s = process.player, self._batches, self.think_s
        assert player is not None
        player.begin_step(step)
        self._check(process, trainee, step - 1)
        trainee.optimizer.zero_grad()
        while (virtual_worker := player.next_virtual_worker()) is not None:
            process.sleep(think_s())
            gradients = batches.gradient(step, virtual_worker, trainee.weights, trainee.buffers["mean"].numpy())
            mean = trainee.buffers["mean"].numpy()
            mean *= 0.5
            mean += batches.means[step, virtual_worker]
            trainee.buffers["steps"].add_(1 + virtual_worker)
            order = batches.orders[virtual_worker]
            trainee.reducer.backward(gradients, order, lambda: process.sleep(PAUSE * think_s()))
            if not np.isnan(record := batches.records[step, virtual_worker]):
                player.record(float(record))
        self.answered += 1
        where = f"of worker {process.rank} in step {step}"
        require(np.array_equal(player.recorded, batches.records[step], equal_nan=True), "other records {}", where)
        expected = self._reference(trainee).after(step).gradients
        for parameter, gradient in zip(trainee.parameters, expected, strict=True):
            found = None if parameter.grad is None else parameter.grad.numpy()
            is_same = found is None if gradient is None else found is not None and np.array_equal(found, gradient)
            require(is_same, "other averages {}: {} and not {}", where, found, gradient)
        process.sleep(think_s())
        trainee.optimizer.step()
        trainee.schedule.step()

    def _reference(self, trainee: Trainee) -> Reference:
        origin = int(trainee.buffers["origin"])
        if origin not in self._references:
            self._references[origin] = Reference(self._batches, origin)
        return self._references[origin]

    def _check(self, process: ElasticProcess, trainee: Trainee, step: int) -> None:
        """The state of a worker is what the plain process has after ``step``."""
        assert process.player is not None
        expected, where = self._reference(trainee).after(step), f"worker {process.rank} after step {step}"
        require(process.player.completed == step, "{} has completed {}", where, process.player.completed)
        require(np.array_equal(trainee.weights, expected.weights), "{} has other weights", where)
        require(np.array_equal(trainee.momentum, expected.momentum), "{} has another momentum {}", where, MOMENTUM)
        require(np.array_equal(trainee.buffers["mean"].numpy(), expected.mean), "{} has another buffer", where)
        steps = int(trainee.buffers["steps"]), trainee.schedule.steps
        require(steps == (step, step), "{} has counted {}", where, steps)

    def _check_left(self, process: ElasticProcess) -> None:
        """Who may leave has given its averages to all who take part, as the coordinator that let it go knows them."""
        views, lead = self.world.views, self.world.lead
        assert process.client is not None
        if lead.is_up and lead.epoch == process.client.control.epoch:
            others = [one for one in map(views.member, views.members) if one not in (None, process) and views.has(one)]
            lacking = [one.rank for one in others if not one.is_dead and one.player.completed != self.scenario.steps]
            require(not lacking, "worker {} left, and workers {} lack averages", process.rank, lacking)

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def changes(self, process: ElasticProcess) -> None:
        """It is about to write a checkpoint, or a part of one."""
        self._changes[self._place_of(process.rank)] += 1

    def wrote(self, process: ElasticProcess, step: int) -> None:
        """A checkpoint was written, or could not be."""
        if any(f"{step:012d}" in name and name.startswith("checkpoint-") for name in process.disk.list()):
            place = self._place_of(process.rank)
            self._written[place] = max(step, self._written.get(place, 0))
            self.world.counts["checkpoints"] += 1

    def found(self, process: ElasticProcess, checkpoint: int) -> None:
        """A process says which checkpoint it has."""
        place = self._place_of(process.rank)
        self._seen[process.number] = self._changes[place]
        expected = 0 if place in self.excused else self._written.get(place, 0)
        require(checkpoint >= expected, "worker {} finds {} and wrote {}", process.rank, checkpoint, expected)

    # ---- the coordinator ---------------------------------------------------------------------------------------

    @property
    def _is_calm(self) -> bool:
        """Whether nothing has failed for so long that nobody has a reason to be out."""
        world = self.world
        calm_s = world.faults.calm_s
        return calm_s is not None and world.clock.now_s > max(calm_s, 0.0) + 2 * self.scenario.lease_s + 2.0

    def coordinated(self, server, message: Message | None, outgoing: list[Any]) -> None:
        for one in outgoing:
            if one.message.type is MessageType.VIEW:
                view = view_of(one.message.body)
                if (view.epoch, view.number) not in self._views:
                    self._views.add((view.epoch, view.number))
                    self._published(view)

    def _published(self, view: View) -> None:
        """What a view says of its members is so, and who is out of it has a reason."""
        world = self.world
        world.liveness.unrest_s = world.clock.now_s
        require(len(view.members) <= self.scenario.virtual_workers, "view {} has too many members", view.number)
        members = {(one.rank, one.incarnation) for one in view.members}
        for member, state in zip(view.members, view.states, strict=True):
            process = world.views.process(member.rank, member.incarnation)
            has = None if process is None else process.player.completed  # it has yet to hear that it is let in
            said = "view {} says that worker {} has completed {}, and it has {}"
            require(state.completed == has, said, view.number, member.rank, state.completed, has)
        gone = [world.views.process(*one) for one in sorted(self._members - members)]
        live = [one.rank for one in gone if one is not None and not (one.is_dead or one.is_leaving)]
        require(not (live and self._is_calm), "view {} is without workers {}, who live", view.number, live)
        self._members = members

    def failed(self, process, error: PSEngineError) -> None:
        """A worker's program has raised."""
        code = error.code if isinstance(error, ServerRefusedError) else type(error).__name__
        others = [one for one in self.world.processes if one.rank == process.rank and not one.is_dead]
        is_second = code == ErrorCode.DUPLICATE_RANK and len(others) > 0  # which of them goes is not promised
        is_spared = code == ErrorCode.FENCED and {one.kind for one in self.scenario.faults} <= DEATHS
        has_reason = code == ErrorCode.ENDED or is_second or not (self._is_calm or is_spared)
        require(has_reason, "worker {} failed though nothing did: {}", process.rank, error)
