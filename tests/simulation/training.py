"""One job of a simulation: its workers, who starts them again, and its oracle."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from psengine.codecs.registry import resolve_codec
from psengine.errors import ConfigurationError, ServerRefusedError
from psengine.parameter_server.chunk_codecs import only_gradients
from psengine.parameter_server.client.options import SessionOptions
from psengine.protocol.layout import job_number
from psengine.protocol.messages import ErrorCode
from simulation import inspection
from simulation.applying import ApplyingJob
from simulation.averaging import AveragingJob
from simulation.elastic import ElasticJob
from simulation.elastic_worker import ElasticProcess
from simulation.groups import Groups
from simulation.job import Job
from simulation.liveness import Liveness
from simulation.merging import MergingJob
from simulation.reader import ReaderProcess
from simulation.scenario import Scenario
from simulation.server import ServerProcess
from simulation.tables import ApplyingTablesJob, MergingTablesJob
from simulation.views import Views
from simulation.violation import require
from simulation.worker import WorkerProcess

if TYPE_CHECKING:
    from simulation.world import Simulation

# A few chunks, in every second job.
CREDIT_BYTES = 200
TIMEOUT_S = 300.0
JOBS: dict[str, type[Job]] = {
    "apply": ApplyingJob,
    "apply tables": ApplyingTablesJob,
    "average": AveragingJob,
    "merge": MergingJob,
    "merge tables": MergingTablesJob,
    "elastic": ElasticJob,
}
OPERATOR_S = 0.25
REST_S = 0.3
# How workers may end that have not come to the end of their training.
ENDS = (ErrorCode.STATE_LOST, ErrorCode.ENDED, ErrorCode.DUPLICATE_RANK, ErrorCode.FENCED, ErrorCode.NOT_MEMBER)

# How a whole run may.
REFUSALS = (ErrorCode.OTHER_RUN, ErrorCode.OTHER_SERVERS)


@dataclass
class Slot:
    """A rank of a training, and the process that has it.

    Attributes:
        rest_s: how long after a death the next process starts; None: nothing has died since.
    """

    training: Training
    rank: int
    process: WorkerProcess | None = None
    rest_s: float | None = None
    is_done: bool = False

    @property
    def is_member(self) -> bool:
        """Whether a process of this rank takes part."""
        return self.rank in self.training.views.members

    def kill_others(self) -> None:
        """This one's process has ended with an error, and with it all that ran in it."""
        for slot in self.together:
            if slot.process is not None and not slot.process.is_dead:
                slot.process.kill()

    @property
    def together(self) -> list[Slot]:
        """This, and the others whose processes are one with this one's."""
        trainings = self.training.cluster.trainings
        is_one = any(training.scenario.is_second_model for training in trainings)
        return [training.slots[self.rank] for training in trainings if is_one or training is self.training]


class Training:
    """See the module's text.

    Args:
        cluster: whose servers, network and faults it has.
        scenario: the job's own part of it; what it says of servers is the cluster's.

    Attributes:
        name: of the job.
        run: the present one.
        home: the servers that were named as the job's values were registered last.
        joins: whether members of a run that was killed may still count: nothing was trained since.
        has_failed: a member of the present run has ended with an error.
        slots: its ranks.
        zombies: processes that do not know yet that they were replaced.
        readers: who reads what it trains, until it is over.
        running: whose thread runs.
    """

    def __init__(self, cluster: Simulation, name: str, scenario: Scenario) -> None:
        self.cluster, self.name, self.scenario = cluster, name, scenario
        self.number = job_number(name)
        self.clock, self.network, self.counts = cluster.clock, cluster.network, cluster.counts
        self.faults = cluster.faults
        self.run, self._later = scenario.run, list(scenario.later)
        self.home, self.joins, self.has_failed = self.run.servers, False, False
        self._rng = random.Random(f"{name} {scenario.seed}")
        self.slots = [Slot(self, rank) for rank in range(scenario.ranks)]
        self.zombies: list[WorkerProcess] = []
        self.readers: list[ReaderProcess] = []
        self.all_processes: list[WorkerProcess] = []
        self.views = Views(self)
        self.liveness = Liveness(self)
        self.job = JOBS[f"{scenario.rule} tables" if scenario.tables else scenario.rule](self)
        self.groups = Groups(self)
        self.running: WorkerProcess | None = None

    @property
    def lead(self) -> ServerProcess:
        """The job's lead."""
        return self.cluster.leaders[self.run.servers[0]]

    @property
    def processes(self) -> Iterator[WorkerProcess]:
        """Workers that have not been replaced, and those that do not know yet that they have."""
        yield from (slot.process for slot in self.slots if slot.process is not None)
        yield from self.zombies

    def process_of(self, rank: int, incarnation: int) -> WorkerProcess | None:
        """Who sends as this worker."""
        return self.views.process(rank, incarnation)

    @property
    def is_over(self) -> bool:
        """Whether all workers of its last run have come to their end."""
        return not self._later and self._has_run_ended

    @property
    def _has_run_ended(self) -> bool:
        if not self.slots[0].is_done:  # it is asked after each event
            return False
        return all(slot.is_done for slot in self.slots) and all(zombie.is_dead for zombie in self.zombies)

    def where(self) -> str:
        """Who waits for what."""
        live = [process for process in self.processes if not process.is_dead]
        return f"{self.name}: " + ("; ".join(process.describe() for process in live) or "nobody runs")

    def begin(self) -> None:
        """Workers are started, and looked after."""
        starts_s = [*(self._rng.random() * 0.3 for _ in range(self.scenario.workers)), *self.scenario.joins_s]
        for slot, start_s in zip(self.slots, starts_s, strict=True):
            self.clock.at(start_s, self._start_if_needed, slot)
        if self.scenario.has_reader:
            self.clock.at(self._rng.random(), self._start_reader)
        self._kill_in_time()
        self.clock.after(OPERATOR_S, self._operate)

    def _begin_next_run(self) -> None:
        """The same job, by other processes."""
        former, self.run = self.run, self._later.pop(0)
        # A worker whose LEAVE was cut off has ended, and is a member for a lease.
        states = [inspection.worker_state(self.lead, self.name, p.rank, p.incarnation) for p in self.all_processes]
        is_cut_short = self.has_failed or former.killed_s is not None or "member" in states
        self.joins, self.has_failed = is_cut_short or (self.joins and not self.job.is_trained), False
        self.counts["later runs"] += 1
        self.scenario = self.job.scenario = replace(self.scenario, workers=self.run.workers)
        self.slots = [Slot(self, rank) for rank in range(self.scenario.ranks)]
        self.zombies.clear()
        self.job.begin_anew()
        if self.run.servers[0] != former.servers[0]:
            self.views.begin_anew()
        for slot in self.slots:
            self.clock.after(self.run.rests_s + self._rng.random() * 0.3, self._start_if_needed, slot)
        self._kill_in_time()

    def _kill_in_time(self) -> None:
        run = self.run

        def kill() -> None:
            for process in self.processes if self.run is run else ():
                if not process.is_dead:
                    process.kill()
            for slot in self.slots if self.run is run else ():
                slot.is_done = True

        if run.killed_s is not None:
            self.clock.after(run.rests_s + run.killed_s, kill)

    def start_anew(self) -> None:
        """Servers have lost all that they had, the elector's terms too: all workers and readers begin once more."""
        for process in [*self.processes, *self.readers]:
            if not process.is_dead:
                process.kill()
        if self.readers:
            self.readers.clear()
            self.clock.after(REST_S, self._start_reader)
        for slot in self.slots:
            slot.process, slot.rest_s, slot.is_done = None, REST_S, False
        self.zombies.clear()
        self.views.begin_anew()
        self.views.epochs.clear()
        self.job.begin_anew()

    def release(self) -> None:
        """The simulation is over."""
        for process in self.all_processes:
            process.release()

    # ---- workers -----------------------------------------------------------------------------------------------

    def _start_worker(self, slot: Slot) -> None:
        shares = slot.rank < self.scenario.shares and self.scenario.rule != "elastic"
        number, options = len(self.all_processes), self._options(slot.rank)
        kind = ElasticProcess if self.scenario.rule == "elastic" else WorkerProcess
        slot.process = kind(self, number, slot.rank, options, options.nonce, shares=shares)
        self.all_processes.append(slot.process)
        self.liveness.unrest_s = self.clock.now_s

    def _start_reader(self) -> None:
        self.readers.append(ReaderProcess(self, len(self.all_processes), self._options(0)))
        self.all_processes += self.readers

    def _options(self, rank: int) -> SessionOptions:
        scenario = self.scenario
        codec = resolve_codec(scenario.codec or None)
        hosts = [range(index, scenario.hosts, scenario.servers) for index in self.run.servers]
        return SessionOptions(
            addresses=["|".join(f"tcp://10.0.0.{host}:0" for host in of_server) for of_server in hosts],
            job=self.name,
            rule=self.job.rule | ({"durability": scenario.asks} if scenario.asks else {}),
            run=self.run.name and f"{self.run.name} {self.counts['started anew']}",
            continues=self.run.continues,
            codec=only_gradients(codec) if scenario.rule == "merge" else codec,
            rank=rank,
            world_size=scenario.workers,
            timeout_s=TIMEOUT_S,
            connect_timeout_s=TIMEOUT_S,
            credit_bytes=CREDIT_BYTES if scenario.seed % 2 else None,
            nonce=self._rng.getrandbits(64),
        )

    def _operate(self) -> None:
        """Look after processes that have ended."""
        for slot in self.slots:
            process = slot.process
            slot.is_done |= any(zombie.rank == slot.rank and zombie.has_finished for zombie in self.zombies)
            if slot.is_done or (process is None and slot.rest_s is None):
                continue
            if process is not None and not process.is_dead:
                continue
            if process is not None:
                slot.process, self.liveness.unrest_s = None, self.clock.now_s
                if process.has_finished:
                    slot.is_done = True
                    continue
                if process.error is not None:
                    self.job.failed(process, process.error)
                if process.error is not None and self._must_begin_anew(process.error, process.has_state):
                    self.cluster.start_anew()
                    break
                if self._has_ended(process):
                    slot.is_done = True
                    continue
                slot.kill_others()
            rests_s, slot.rest_s = slot.rest_s or REST_S, None
            self.clock.after(rests_s, self._start_if_needed, slot)
        if self.is_over:
            for reader in self.readers:
                reader.kill()
            self.readers.clear()
        if self._waits_for_values():
            self.cluster.start_anew()
        self._end_training()
        if self._later and self._has_run_ended:
            self._begin_next_run()
        self.clock.after(OPERATOR_S, self._operate)

    def _must_begin_anew(self, error: Exception, has_state: bool) -> bool:
        """A worker has failed: whether only an operator can help, because servers have lost the job's state."""
        code = error.code if isinstance(error, ServerRefusedError) else ""
        if isinstance(error, ConfigurationError):
            code = ErrorCode.OTHER_SERVERS
        has_no_room = code == ErrorCode.MEMORY and self.scenario.room is not None and not has_state
        is_expected = code in (*ENDS, *self._refusals()) or has_no_room
        require(is_expected, "a worker failed: {}: {}", type(error).__name__, error)
        self.counts[f"worker ended: {code}"] += 1
        if code != ErrorCode.STATE_LOST:
            return False
        is_kept = self.scenario.snapshot_s is not None and not self.job.excused and self.scenario.rule != "average"
        require(not is_kept, "servers have lost the job's state: {}", error)
        return True

    def _refusals(self) -> list[str]:
        """Why the present run may be refused as a whole: the values are elsewhere, or another's."""
        if not (self.job.is_trained or self.joins):
            return []
        has_lost = not self.job.keeps_updates and self.counts["leads"] > self.cluster.scenario.servers
        is_elsewhere = self.run.servers != self.home or has_lost
        return [ErrorCode.OTHER_SERVERS] * is_elsewhere + [ErrorCode.OTHER_RUN] * (not self.run.continues)

    def _has_ended(self, process: WorkerProcess) -> bool:
        """Whether a worker came to a job that has ended, and nobody is in it; or its run was refused."""
        if isinstance(process.error, ConfigurationError):
            return True
        if isinstance(process.error, ServerRefusedError) and process.error.code in REFUSALS:
            return True
        if not isinstance(process.error, ServerRefusedError) or process.error.code != ErrorCode.ENDED:
            return False
        others = [one.rank for one in self.processes if one.takes_part]
        require(not others, "worker {} hears that the job has ended, and workers {} are in it", process.rank, others)
        return True

    def _waits_for_values(self) -> bool:
        """Whether workers wait for others that have ended, because servers have lost what those did."""
        scenario, lead = self.scenario, self.lead
        ended = [slot.rank for slot in self.slots if slot.is_done]
        are_awaited = not self.job.keeps_updates and any(inspection.awaits(lead, self.name, rank) for rank in ended)
        if scenario.rule in ("average", "elastic") or not (0 in ended or are_awaited):
            return False
        since_s = self.clock.now_s - scenario.lease_s
        waiting = [one for one in self.processes if not one.is_dead and (are_awaited or not one.has_state)]
        return any(one.waits_since_s < since_s for one in waiting)

    def _start_if_needed(self, slot: Slot) -> None:
        if not slot.is_done and slot.process is None:
            self._start_worker(slot)

    def _end_training(self) -> None:
        """Once a replica is trained, nobody waits for processes that have yet to get its state, or to get it again."""
        if self.scenario.rule == "elastic":
            return  # the coordinator tells them
        are_done = [slot.is_done for slot in self.slots]
        if not (any(are_done) if self.scenario.rule == "average" else all(are_done)):
            return
        for slot in self.slots:
            if slot.process is None or slot.process.needs_state:
                slot.is_done = True
        for process in list(self.processes):
            if not process.is_dead and process.needs_state:
                process.kill()
