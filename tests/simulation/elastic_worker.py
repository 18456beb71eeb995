"""One life of a worker of an elastic job: the real player, membership and client, in a thread that is stepped."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from typing_extensions import override

from psengine.collectives.base import Collective
from psengine.errors import CollectiveError
from psengine.parameter_server.client.elastic import ElasticClient, elastic_rule
from psengine.parameter_server.client.flow import Flow
from psengine.parameter_server.client.join import greet
from psengine.parameter_server.server.coordinator.elastic import FIRST_WORKER_LEASES
from psengine.parameter_server.server.log import disk as disk_module
from psengine.protocol.views import View
from psengine.strategies.elastic import checkpoints, coordinated
from psengine.strategies.elastic.coordinated import FORM_S, CoordinatedMembership
from psengine.strategies.elastic.membership import Group
from psengine.strategies.elastic.player import Player
from simulation.baton import Baton
from simulation.disk import Killed, SimulatedDisk
from simulation.groups import SimulatedCollective
from simulation.stepped_flow import SteppedFlow
from simulation.worker import WorkerProcess

LONGEST_WRITE_S = 0.3
CALLS_PER_CHECKPOINT = 8  # of the disk


class ElasticProcess(WorkerProcess):
    """See the module's text.

    Attributes:
        client: None until it enters.
        player: None until it has made its model.
        is_leaving: its training is over.
    """

    client: ElasticClient | None
    player: Player | None

    @override
    def _begin(self) -> None:
        self.client = self.player = None
        self.is_leaving = False
        self._writing: Writing | None = None
        self._program: Baton = Baton(lambda: self.world.job.train(self))

    @property
    @override
    def receiver(self) -> Any:
        return self.client

    @property
    @override
    def needs_state(self) -> bool:
        return self.player is None or self.player.completed is None

    @property
    @override
    def takes_part(self) -> bool:
        return super().takes_part and not self.is_leaving

    @property
    @override
    def incarnation(self) -> int:
        return 0 if self.client is None else self.client.identity.incarnation

    @property
    @override
    def patience_s(self) -> float:
        """A spare waits for a place, and a job for its worker 0, which may have ended at a former coordinator."""
        world = self.world
        if self.needs_state and len(world.views.members) >= world.scenario.virtual_workers:
            return math.inf
        is_first_gone = self.needs_state and world.slots[0].process is None
        return FIRST_WORKER_LEASES * world.scenario.lease_s if is_first_gone else 0.0

    @override
    def describe(self) -> str:
        completed = None if self.player is None else self.player.completed
        news = self.client is not None and self.client.preparing is not None
        return f"worker {self.rank} ({self.number}) since {self.waits_since_s:.2f} s, step {completed}, news {news}"

    @override
    def _look(self) -> None:
        if self.client is not None:
            self.client.tick(self.clock.now_s)

    @override
    def _step(self) -> None:
        self.world.running = self
        super()._step()

    @override
    def _end(self, server_s: float) -> None:
        super()._end(server_s)
        self.world.groups.died(self, is_silent=server_s > 0)
        if self._writing is not None:
            self._writing.tear()
        if server_s > 0:
            self.disk.lose_power()
        self.release()

    def release(self) -> None:
        """Nothing of it is left."""
        self._program.cancel()

    # ---- what blocks its thread ----------------------------------------------------------------------------------

    def happens(self, call: Callable[[], object]) -> None:
        """Something comes from another process."""
        self._call(call)

    def park(self, ready: Callable[[], object]) -> None:
        """Wait for it."""
        self._program.park(ready)

    def sleep(self, time_s: float) -> None:
        """Compute."""
        until_s = self.clock.now_s + time_s
        self.clock.after(time_s, self._call, lambda: None)
        self.park(lambda: self.clock.now_s >= until_s)

    # ---- its checkpoints -----------------------------------------------------------------------------------------

    @property
    def disk(self) -> SimulatedDisk:
        """Where its checkpoints are."""
        return self.world.job.disk_of(self.rank)  # type: ignore[no-any-return]

    def writes(self, writing: Writing) -> None:
        """It begins to write a checkpoint."""
        self._writing = writing
        self.clock.after(self.world.job.random_s(LONGEST_WRITE_S), self._call, writing.write)


class Writing:
    """In the place of the thread that writes a checkpoint: it writes at one moment, or dies in the midst of it."""

    def __init__(self, world, target: Callable[..., None] | None = None, args: tuple[Any, ...] = (), **_: Any) -> None:
        self._process, self._job, self._is_alive = world.running, world.job, False
        self._write, self._step = partial(target, *args) if target is not None else None, args[0] if args else 0

    def start(self) -> None:
        self._is_alive = True
        self._process.writes(self)

    def write(self) -> None:
        """Its moment."""
        assert self._write is not None
        self._job.changes(self._process)
        self._write()
        self._is_alive = False
        self._job.wrote(self._process, self._step)

    def tear(self) -> None:
        """The process dies."""
        if self._is_alive and self._write is not None:
            self._job.changes(self._process)
            state = self._process.disk.state
            state.calls_left = int(self._job.random_s(CALLS_PER_CHECKPOINT))
            with suppress(Killed):
                self._write()
            state.calls_left = None

    def is_alive(self) -> bool:
        return self._is_alive

    def join(self, timeout_s: float) -> None:
        self._process.park(lambda: not self._is_alive)


class SimulatedMembership(CoordinatedMembership):
    """The real one, but for its thread and its sockets."""

    def __init__(self, process: ElasticProcess, virtual_workers: int) -> None:
        super().__init__(virtual_workers)
        self._process = process

    @override
    def enter(self, facts: Mapping[str, str], checkpoint: int) -> Group:
        process = self._process
        options = replace(process.options, rule=elastic_rule(self._virtual_workers, facts))
        process.world.job.found(process, checkpoint)
        self._job = process.client = ElasticClient(options, process.runtime, checkpoint)
        self._run(greet(self._job))
        return self._next_group()

    @override
    def _run(self, flow: Flow[Any]) -> Any:
        stepped, clock = SteppedFlow(flow), self._process.clock

        def is_over() -> bool:
            stepped.step(clock.now_s)
            return stepped.is_over

        self._process.park(is_over)
        if stepped.error is not None:
            raise stepped.error
        return stepped.result

    @override
    def _form(self, view: View) -> Collective:
        process, job = self._process, self._entered
        group = process.world.groups.of(view)
        workers = [member.rank for member in view.members]
        rank = workers.index(job.identity.worker)
        until_s = process.clock.now_s + FORM_S
        name, meeting, formed = self._name_of(view), self._store_of(view), False
        keys = [f"{name}/{number}" for number in range(len(workers))]
        group.processes[rank] = process
        job.meet(view.number, keys[rank], b"")

        def is_over() -> bool:
            nonlocal formed
            formed = meeting.check(keys) and group.is_connected(process)
            return formed or self.has_news or rank in group.failed or process.clock.now_s >= until_s

        process.park(is_over)
        if not formed or rank in group.failed:
            group.leave(rank)
            raise CollectiveError("somebody did not come")
        return SimulatedCollective(group, rank)


def simulated_machine(world) -> ExitStack:
    """Inside, processes of elastic jobs see the simulated machine."""
    stack = ExitStack()

    def disk(_: Path) -> SimulatedDisk:
        return world.running.disk  # type: ignore[no-any-return]

    thread = SimpleNamespace(Thread=partial(Writing, world))
    stack.enter_context(mock.patch.object(checkpoints, "threading", thread))
    stack.enter_context(mock.patch.object(disk_module, "DirectoryDisk", disk))
    stack.enter_context(
        mock.patch.object(coordinated, "has_exited", lambda number: world.all_processes[number].is_dead)
    )
    return stack
