"""A scenario, run: servers, workers, faults, and an operator who starts again what has died."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from psengine.codecs.registry import resolve_codec
from psengine.errors import ServerRefusedError, SnapshotError
from psengine.parameter_server.chunk_codecs import only_gradients
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.server.replication.election import Leadership
from psengine.protocol.messages import ErrorCode
from simulation import inspection
from simulation.applying import ApplyingJob
from simulation.averaging import AveragingJob
from simulation.clock import Clock
from simulation.elastic import ElasticJob
from simulation.elastic_worker import ElasticProcess, simulated_machine
from simulation.electing import SimulatedElector
from simulation.faults import Faults
from simulation.groups import Groups
from simulation.job import Job
from simulation.liveness import Liveness
from simulation.merging import MergingJob
from simulation.network import Network, rank_of
from simulation.scenario import Scenario
from simulation.server import ServerProcess, shard_thread_time
from simulation.snapshots import ServerDisk, Snapshots
from simulation.views import Views
from simulation.violation import Violation, require
from simulation.worker import WorkerProcess

# Once nothing fails any more, everything has to end within this time, and no operation may run into its deadline.
LIVENESS_S = 90.0
# A few chunks, in every second job.
CREDIT_BYTES = 200
TIMEOUT_S = 300.0
JOBS: dict[str, type[Job]] = {"apply": ApplyingJob, "average": AveragingJob, "merge": MergingJob, "elastic": ElasticJob}
OPERATOR_S = 0.25
REST_S = 0.3
# How workers may end that have not come to the end of their training.
ENDS = (ErrorCode.STATE_LOST, ErrorCode.ENDED, ErrorCode.DUPLICATE_RANK, ErrorCode.FENCED, ErrorCode.NOT_MEMBER)


@dataclass
class Slot:
    """A rank, and the process that has it.

    Attributes:
        rest_s: how long after a death the next process starts; None: nothing has died since.
    """

    rank: int
    process: WorkerProcess | None = None
    rest_s: float | None = None
    is_done: bool = False


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        violation: the promise that was broken; "" where none was.
        digest: of everything that happened.
        trace: what happened, line by line, where that was wanted.
    """

    violation: str
    digest: str
    events: int
    answered: int
    simulated_s: float
    counts: Counter[str]
    trace: list[str] | None


class Simulation:
    """See the module's text."""

    def __init__(self, scenario: Scenario, *, traces: bool = False) -> None:
        self.scenario = scenario
        self.clock = Clock(traces=traces)
        self.counts: Counter[str] = Counter()
        self._rng = random.Random(f"world {scenario.seed}")
        network_rng = random.Random(f"network {scenario.seed}")
        self.network = Network(self.clock, network_rng, scenario.latency_s, scenario.lease_s)
        self.slots = [Slot(rank) for rank in range(scenario.ranks)]
        self.zombies: list[WorkerProcess] = []
        self.disks = [ServerDisk(random.Random(f"disk {host} {scenario.seed}")) for host in range(scenario.hosts)]
        # A server and its follower have about the same time.
        self._wrong_s = [self._rng.choice((-30.0, 0.0, 30.0)) for _ in range(scenario.servers)]
        self.views = Views(self)
        self.faults = Faults(self)
        self.liveness = Liveness(self)
        self.job = JOBS[scenario.rule](self)
        self.all_processes: list[WorkerProcess] = []
        self.groups = Groups(self)
        self.running: WorkerProcess | None = None  # whose thread runs
        self.leaders: dict[int, ServerProcess] = {}  # by server, the process that leads, or did last
        self.electors = [SimulatedElector(self, index) for index in range(scenario.servers)]

    @property
    def lead(self) -> ServerProcess:
        """The job's lead."""
        return self.leaders[0]

    @property
    def processes(self) -> Iterator[WorkerProcess]:
        """Workers that have not been replaced, and those that do not know yet that they have."""
        yield from (slot.process for slot in self.slots if slot.process is not None)
        yield from self.zombies

    def process_of(self, rank: int, incarnation: int) -> WorkerProcess | None:
        """Who sends as this worker."""
        return self.views.process(rank, incarnation)

    # ---- the run -----------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Until everything has ended, or a promise is broken."""
        violation = ""
        try:
            with shard_thread_time(self), simulated_machine(self):
                self._run()
        except Violation as error:
            violation = str(error)
        except Exception as error:
            violation = f"{type(error).__name__}: {error}"
            if self.clock.trace is not None:
                raise
        finally:
            for process in self.all_processes:
                process.release()
            for server in self.network.servers:
                server.release()
        counts, clock = self.counts + self.network.counts, self.clock
        return Result(violation, clock.digest, clock.events, self.job.answered, clock.now_s, counts, clock.trace)

    def _run(self) -> None:
        scenario, clock = self.scenario, self.clock
        for host in range(scenario.hosts):
            self.network.servers.append(self._make_server(host))
        for host in range(scenario.hosts):
            self._begin(host)
        starts_s = [*(self._rng.random() * 0.3 for _ in range(scenario.workers)), *scenario.joins_s]
        for slot, start_s in zip(self.slots, starts_s, strict=True):
            clock.at(start_s, self._start_worker, slot)
        self.faults.schedule()
        clock.after(OPERATOR_S, self._operate)
        last_s = max((fault.at_s + fault.lasts_s + 1.0 for fault in scenario.faults), default=0.0)
        if not clock.run(last_s + LIVENESS_S, self._is_over):
            raise Violation(f"not over {LIVENESS_S:g} s after the last fault: {self.where()}")

    def _is_over(self) -> bool:
        for slot in self.slots:
            if not slot.is_done:
                return False
        return all(zombie.is_dead for zombie in self.zombies)

    def where(self) -> str:
        """Who waits for what."""
        live = [process for process in self.processes if not process.is_dead]
        return "; ".join(process.describe() for process in live) or "nobody runs"

    # ---- servers -----------------------------------------------------------------------------------------------

    def _make_server(self, host: int) -> ServerProcess:
        scenario = self.scenario
        addresses = [f"tcp://10.0.0.{host}:{shard}" for shard in range(scenario.shards)]
        server = ServerProcess(self, host, addresses, self._wrong_s[host % scenario.servers])
        if scenario.snapshot_s is not None:
            server.snapshots = Snapshots(server, self.disks[host], self.job, scenario.snapshot_s, self._rng)
        return server

    def _begin(self, host: int) -> None:
        """A server starts from its disk; where that is damaged, the operator gives it an empty one."""
        server = self.network.servers[host]
        self.liveness.unrest_s = self.clock.now_s
        self.leaders.setdefault(server.index, server)
        try:
            server.start()
            if self.scenario.keeps_log and not self.scenario.has_followers:
                self._begin_logs(server)
        except OSError:
            self._cannot_write(host)
        except SnapshotError as error:
            if self.disks[host].files.state.problem:
                self._cannot_write(host)
                return
            require(server.index in self.job.excused, "server {} cannot read its own disk: {}", host, error)
            self.counts["disk refused"] += 1
            server.kill()
            self.clock.after(0.1, self._restart_server, host)
            self._start_anew()

    def _begin_logs(self, server: ServerProcess, *, is_copy: bool = False) -> None:
        host = server.host
        server.snapshots.begin_logs(lambda: self.kill_server(host, REST_S, loses_power=True), is_copy=is_copy)

    def begin_logs(self, server: ServerProcess, *, is_copy: bool) -> bool:
        """A server that has a follower, or is one, begins to write; whether it could."""
        try:
            self._begin_logs(server, is_copy=is_copy)
        except (OSError, SnapshotError):
            self.clock.after(0.0, self.end_server, server)
            return False
        return True

    def leads(self, server: ServerProcess) -> None:
        """From here on this process leads, with what it has."""
        self.counts["takes over" if self.leaders[server.index].host != server.host else "leads"] += 1
        self.leaders[server.index] = server
        self.liveness.unrest_s = self.clock.now_s
        self.views.server_started(server)
        self.job.server_started(server)

    def _look_after_followers(self) -> None:
        """Where all who had the state are dead, the leader's next life begins with nothing."""
        for elector in () if self.scenario.keeps_log else self.electors:
            record = elector.recorded
            has_follower = record is not None and len(record.members) > 1
            if has_follower and not (elector.is_held or any(map(elector.lives, record.members))):
                elector.recorded = Leadership(record.term, record.members[:1], record.number + 1)

    def end_server(self, server: ServerProcess) -> None:
        """A process ends, and starts again."""
        if self.network.servers[server.host] is server:
            self.kill_server(server.host, REST_S * self._rng.random())

    def _cannot_write(self, host: int) -> None:
        self.counts["server cannot write"] += 1
        self.kill_server(host, REST_S)

    def kill_server(self, host: int, rests_s: float, *, loses_power: bool = False) -> None:
        """The server dies, perhaps with its machine, and comes back after ``rests_s``."""
        server = self.network.servers[host]
        if not server.is_up:
            return
        if server is self.lead:
            self.counts[f"lead dies: {inspection.coordinator_state(server) or 'no job'}"] += 1
        self.counts[f"server dies: {inspection.shard_state(server.shards[-1])}"] += 1
        server.kill()
        if loses_power:
            self.disks[host].files.lose_power()
        for one in self.network.between(None, host):
            self.network.drop(one, worker_s=self._rng.random() * 0.5, server_s=0.0)
        for one in self.network.between(rank_of(host), None):
            self.network.drop(one, worker_s=0.0, server_s=self._rng.random() * 0.5)
        self.clock.after(rests_s, self._restart_server, host)

    def _restart_server(self, host: int) -> None:
        self.network.servers[host] = self._make_server(host)
        self._begin(host)

    # ---- workers -----------------------------------------------------------------------------------------------

    def _start_worker(self, slot: Slot) -> None:
        scenario = self.scenario
        codec = resolve_codec(scenario.codec or None)
        hosts = [range(index, scenario.hosts, scenario.servers) for index in range(scenario.servers)]
        options = SessionOptions(
            addresses=["|".join(f"tcp://10.0.0.{host}:0" for host in of_server) for of_server in hosts],
            job="job",
            rule=self.job.rule,
            run=f"run {self.counts['started anew']}",
            codec=only_gradients(codec) if scenario.rule == "merge" else codec,
            rank=slot.rank,
            world_size=scenario.workers,
            timeout_s=TIMEOUT_S,
            connect_timeout_s=TIMEOUT_S,
            credit_bytes=CREDIT_BYTES if scenario.seed % 2 else None,
        )
        shares = slot.rank < scenario.shares and scenario.rule != "elastic"
        number, nonce = len(self.all_processes), self._rng.getrandbits(64)
        kind = ElasticProcess if scenario.rule == "elastic" else WorkerProcess
        slot.process = kind(self, number, slot.rank, options, nonce, shares=shares)
        self.all_processes.append(slot.process)
        self.liveness.unrest_s = self.clock.now_s

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
                if process.error is not None and self._must_begin_anew(process.error):
                    self._start_anew()
                    break
                if self._has_ended(process):
                    slot.is_done = True
                    continue
            rests_s, slot.rest_s = slot.rest_s or REST_S, None
            self.clock.after(rests_s, self._start_if_needed, slot)
        self._look_after_followers()
        if self._waits_for_values():
            self._start_anew()
        self._end_training()
        self.clock.after(OPERATOR_S, self._operate)

    def _must_begin_anew(self, error: Exception) -> bool:
        """A worker has failed: whether only an operator can help, because servers have lost the job's state."""
        code = error.code if isinstance(error, ServerRefusedError) else ""
        require(code in ENDS, "a worker failed: {}: {}", type(error).__name__, error)
        self.counts[f"worker ended: {code}"] += 1
        if code != ErrorCode.STATE_LOST:
            return False
        is_kept = self.job.keeps_updates and self.scenario.rule != "average"
        require(not is_kept, "servers have lost the job's state: {}", error)
        return True

    def _has_ended(self, process: WorkerProcess) -> bool:
        """Whether a worker came to a job that has ended; then nobody is in it."""
        if not isinstance(process.error, ServerRefusedError) or process.error.code != ErrorCode.ENDED:
            return False
        others = [one.rank for one in self.processes if one.takes_part]
        require(not others, "worker {} hears that the job has ended, and workers {} are in it", process.rank, others)
        return True

    def _waits_for_values(self) -> bool:
        """Whether workers wait for others that have ended, because servers have lost what those did."""
        scenario, lead = self.scenario, self.lead
        ended = [slot.rank for slot in self.slots if slot.is_done]
        are_awaited = not self.job.keeps_updates and any(inspection.awaits(lead, rank) for rank in ended)
        if scenario.rule in ("average", "elastic") or not (0 in ended or are_awaited):
            return False
        since_s = self.clock.now_s - scenario.lease_s
        waiting = [one for one in self.processes if not one.is_dead and (are_awaited or not one.has_state)]
        return any(one.waits_since_s < since_s for one in waiting)

    def _start_if_needed(self, slot: Slot) -> None:
        if not slot.is_done and slot.process is None:
            self._start_worker(slot)

    def _start_anew(self) -> None:
        """Start all servers and workers anew, as the error says."""
        self.counts["started anew"] += 1
        for process in list(self.processes):
            if not process.is_dead:
                process.kill()
        for slot in self.slots:
            slot.process, slot.rest_s, slot.is_done = None, REST_S, False
        self.zombies.clear()
        self.views.members = {}
        self.faults.begin_anew()
        self.job.begin_anew()
        for server in self.network.servers:
            if server.is_up:
                self.kill_server(server.host, 0.1)
            self.disks[server.host].clear()
            self.job.damaged(server.index, None)
        self.electors = [SimulatedElector(self, index) for index in range(self.scenario.servers)]

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


def run(scenario: Scenario, *, traces: bool = False) -> Result:
    """Run a scenario; ``traces`` keeps what happened, and raises what is no finding of the oracle."""
    return Simulation(scenario, traces=traces).run()
