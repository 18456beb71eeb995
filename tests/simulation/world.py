"""A scenario, run: servers, workers, faults, and an operator who starts again what has died."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from psengine.errors import SnapshotError
from psengine.parameter_server.server.replication.election import Leadership
from simulation import inspection
from simulation.clock import Clock
from simulation.elastic_worker import simulated_machine
from simulation.electing import SimulatedElector
from simulation.faults import Faults
from simulation.network import Network, rank_of
from simulation.scenario import Scenario
from simulation.server import ServerProcess, shard_thread_time
from simulation.snapshots import ServerDisk, Snapshots
from simulation.training import OPERATOR_S, REST_S, Slot, Training
from simulation.violation import Violation, require

# Once nothing fails any more, everything has to end within this time, and no operation may run into its deadline.
LIVENESS_S = 90.0
# By how much a server's clock may have been set back when the server starts again.
SET_BACK_S = 60.0


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
    """See the module's text.

    Attributes:
        trainings: the scenario's job, and those beside it.
        leaders: by server, the process that leads, or did last.
    """

    def __init__(self, scenario: Scenario, *, traces: bool = False) -> None:
        self.scenario = scenario
        self.clock = Clock(traces=traces)
        self.counts: Counter[str] = Counter()
        self._rng = random.Random(f"world {scenario.seed}")
        network_rng = random.Random(f"network {scenario.seed}")
        self.network = Network(self.clock, network_rng, scenario.latency_s, scenario.lease_s)
        self.disks = [ServerDisk(random.Random(f"disk {host} {scenario.seed}")) for host in range(scenario.hosts)]
        # By server: how wrong the clock is of the one that leads at first.
        self._wrong_s = [self._rng.choice((-30.0, 0.0, 30.0)) for _ in range(scenario.servers)]
        self.faults = Faults(self)
        self.leaders: dict[int, ServerProcess] = {}
        self.trainings = [Training(self, "job", scenario)]
        if (other := scenario.companion) is not None:
            self.trainings.append(Training(self, "job.1" if other.is_second_model else "other", other))
        self.electors = [SimulatedElector(self, index) for index in range(scenario.servers)]

    @property
    def lead(self) -> ServerProcess:
        """The job's lead."""
        return self.leaders[0]

    @property
    def training(self) -> Training:
        """That of the scenario's job."""
        return self.trainings[0]

    @property
    def slots(self) -> list[Slot]:
        """All workers' ranks."""
        return [slot for training in self.trainings for slot in training.slots]

    def training_of(self, job: int) -> Training:
        """By the number of its job."""
        return next(training for training in self.trainings if training.number == job)

    def damaged(self, server: int, note: dict[int, Any]) -> None:
        """The newest snapshot that a server can restore has only what ``note`` says of each job, or is none."""
        for training in self.trainings:
            training.job.damaged(server, note.get(training.number))

    def unrest(self) -> None:
        """Something changed that workers may have to wait for."""
        for training in self.trainings:
            training.liveness.unrest_s = self.clock.now_s

    # ---- the run -----------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Until everything has ended, or a promise is broken."""
        violation = ""
        try:
            with shard_thread_time(self), simulated_machine(self.training):
                self._run()
        except Violation as error:
            violation = str(error)
        except Exception as error:
            violation = f"{type(error).__name__}: {error}"
            if self.clock.trace is not None:
                raise
        finally:
            for training in self.trainings:
                training.release()
            for server in self.network.servers:
                server.release()
        counts, clock = self.counts + self.network.counts, self.clock
        answered = sum(training.job.answered for training in self.trainings)
        return Result(violation, clock.digest, clock.events, answered, clock.now_s, counts, clock.trace)

    def _run(self) -> None:
        scenario, clock = self.scenario, self.clock
        for host in range(scenario.hosts):
            self.network.servers.append(self._make_server(host))
        for host in range(scenario.hosts):
            self._begin(host)
        for training in self.trainings:
            training.begin()
        self.faults.schedule()
        clock.after(OPERATOR_S, self._operate)
        last_s = max((fault.at_s + fault.lasts_s + 1.0 for fault in scenario.faults), default=0.0)
        longest_s = LIVENESS_S * (1 + len(scenario.later))
        if not clock.run(last_s + longest_s, self._is_over):
            raise Violation(f"not over {longest_s:g} s after the last fault: {self.where()}")

    def _is_over(self) -> bool:
        return self.training.is_over and all(training.is_over for training in self.trainings)

    def where(self) -> str:
        """Who waits for what."""
        return "; ".join(training.where() for training in self.trainings)

    # ---- servers -----------------------------------------------------------------------------------------------

    def _make_server(self, host: int) -> ServerProcess:
        scenario = self.scenario
        addresses = [f"tcp://10.0.0.{host}:{shard}" for shard in range(scenario.shards)]
        wrong_s = self._wrong_s[host % scenario.servers] + scenario.apart_s * (host >= scenario.servers)
        if self.clock.now_s and (scenario.durability != "memory" or not self._leads_a_job(host)):
            wrong_s -= random.Random(f"clock {scenario.seed} {host} {self.clock.now_s}").choice((0.0, 0.0, SET_BACK_S))
        server = ServerProcess(self, host, addresses, wrong_s)
        if scenario.snapshot_s is not None:
            server.snapshots = Snapshots(server, self.disks[host], self, scenario.snapshot_s, self._rng)
        return server

    def _leads_a_job(self, host: int) -> bool:
        """Whether a run of some job names this server first; without a disk only its clock orders what it gives."""
        jobs = [training.scenario for training in self.trainings]
        return any(run.servers[0] == host for job in jobs for run in (job.run, *job.later))

    def _begin(self, host: int) -> None:
        """A server starts from its disk; where that is damaged, the operator gives it an empty one."""
        server = self.network.servers[host]
        self.unrest()
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
            require(server.index in self.training.job.excused, "server {} cannot read its own disk: {}", host, error)
            self.counts["disk refused"] += 1
            server.kill()
            self.clock.after(0.1, self._restart_server, host)
            self.start_anew()

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
        self.unrest()
        for training in self.trainings:
            training.views.server_started(server)
            training.job.server_started(server)

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

    # ---- what an operator does ---------------------------------------------------------------------------------

    def start_anew(self) -> None:
        """Start all servers and workers anew, as the error says."""
        self.counts["started anew"] += 1
        for training in self.trainings:
            training.start_anew()
        self.faults.begin_anew()
        for server in self.network.servers:
            if server.is_up:
                self.kill_server(server.host, 0.1)
            self.disks[server.host].clear()
            self.damaged(server.index, {})
        self.electors = [SimulatedElector(self, index) for index in range(self.scenario.servers)]

    def _operate(self) -> None:
        self._look_after_followers()
        self.clock.after(OPERATOR_S, self._operate)


def run(scenario: Scenario, *, traces: bool = False) -> Result:
    """Run a scenario; ``traces`` keeps what happened, and raises what is no finding of the oracle."""
    return Simulation(scenario, traces=traces).run()
