"""A scenario, run: servers, workers, faults, and an operator who starts again what has died."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from functools import partial

from psengine.codecs.base import Codec
from psengine.codecs.registry import resolve_codec
from psengine.errors import ServerRefusedError, SnapshotError
from psengine.parameter_server.chunk_codecs import only_gradients
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.server.interfaces import ShardSettings
from psengine.protocol.messages import ErrorCode
from simulation import faults
from simulation.applying import ApplyingJob
from simulation.averaging import AveragingJob
from simulation.clock import Clock
from simulation.leases import Leases
from simulation.memory_limit import MemoryLimit
from simulation.merging import MergingJob
from simulation.network import Network
from simulation.scenario import Scenario
from simulation.segments import SimulatedSegments
from simulation.server import ServerProcess
from simulation.snapshots import ServerDisk, Snapshots
from simulation.violation import Violation, require
from simulation.worker import WorkerProcess

# Once nothing fails any more, everything has to end within this time, and no operation may run into its deadline.
LIVENESS_S = 90.0
TIMEOUT_S = 300.0
JOBS = {"apply": ApplyingJob, "average": AveragingJob, "merge": MergingJob}
OPERATOR_S = 0.25
REST_S = 0.3


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
        self._rng = random.Random(f"world {scenario.seed}")
        self.network = Network(self.clock, random.Random(f"network {scenario.seed}"), scenario.latency_s)
        self.counts: Counter[str] = Counter()
        self.job = JOBS[scenario.rule](scenario)
        self.slots = [Slot(rank) for rank in range(scenario.workers)]
        self.disks = [ServerDisk(random.Random(f"disk {index} {scenario.seed}")) for index in range(scenario.servers)]
        self.memory = MemoryLimit(scenario, sum(spec.size_bytes for spec in self.job.specs))
        self.witness = Leases(self.memory.witness(self.job), scenario)
        self.zombies: list[WorkerProcess] = []
        self._processes = 0

    def run(self) -> Result:
        """Until everything has ended, or a promise is broken."""
        violation = ""
        try:
            self._run()
        except Violation as error:
            violation = str(error)
        except Exception as error:
            violation = f"{type(error).__name__}: {error}"
            if self.clock.trace is not None:
                raise
        finally:
            for server in self.network.servers:
                if server.is_up:
                    server.release()
        counts = self.counts + self.network.counts
        clock = self.clock
        return Result(violation, clock.digest, clock.events, self.job.answered, clock.now_s, counts, clock.trace)

    def _run(self) -> None:
        scenario = self.scenario
        for index in range(scenario.servers):
            self.network.servers.append(self._make_server(index))
        for index in range(scenario.servers):
            self._begin(index)
        for slot in self.slots:
            self.clock.after(self._rng.random() * 0.3, self._start_worker, slot)
        for fault in scenario.faults:
            self.clock.at(fault.at_s, faults.begin, self, fault)
        self.clock.after(OPERATOR_S, self._operate)
        ends_s = scenario.healed_s + LIVENESS_S
        if not self.clock.run(ends_s, self._is_over):
            raise Violation(f"not over {LIVENESS_S:g} s after the last fault: {self._where()}")

    def _is_over(self) -> bool:
        for slot in self.slots:
            if not slot.is_done:
                return False
        return all(zombie.is_dead for zombie in self.zombies)

    def _where(self) -> str:
        found = []
        for process in [*(slot.process for slot in self.slots), *self.zombies]:
            if process is not None and not process.is_dead:
                open_now = [one.describe() for link in process.membership.links for one in link.open_operations()]
                found.append(f"worker {process.rank} ({process.number}) waits for {open_now}")
        return "; ".join(found) or "nobody runs"

    # ---- servers -----------------------------------------------------------------------------------------------

    def _make_server(self, index: int) -> ServerProcess:
        scenario = self.scenario
        settings = ShardSettings(
            lease_s=scenario.lease_s,
            heartbeat_s=scenario.heartbeat_s,
            durability=scenario.durability,
            software="simulated",
            max_memory_bytes=self.memory.limit_bytes,
        )
        server = ServerProcess(
            self.clock,
            self.network,
            self.witness,
            index,
            [f"tcp://10.0.0.{index}:{shard}" for shard in range(scenario.shards)],
            self._rng.getrandbits(32) << 8 | index,
            settings,
            self._rng.choice((-30.0, 0.0, 0.0, 30.0)),
            scenario.tick_s,
        )
        for segments in server.segments:
            segments.is_open = scenario.shares > 0
        if scenario.snapshot_s is not None:
            server.snapshots = Snapshots(server, self.disks[index], self.job, scenario.snapshot_s, self._rng)
        return server

    def _begin(self, index: int) -> None:
        """A server starts from its disk; where that is damaged, the operator gives it an empty one."""
        server = self.network.servers[index]
        try:
            server.start()
        except SnapshotError:
            require(self.job.is_excused(index), "server {} cannot read its own disk", index)
            self.counts["disk refused"] += 1
            server.kill()
            self.clock.after(0.1, self._restart_server, index)
            self._start_anew()
            return
        if self.scenario.keeps_log and server.snapshots is not None:
            try:
                server.snapshots.keep_logs(lambda: self.kill_server(index, REST_S, loses_power=True))
            except SnapshotError:  # no log begins without a snapshot of what it goes on from
                self.counts["server cannot write"] += 1
                self.kill_server(index, REST_S)

    def kill_server(self, index: int, rests_s: float, *, loses_power: bool = False) -> None:
        """The server dies, perhaps with its machine, and comes back after ``rests_s``."""
        server = self.network.servers[index]
        if not server.is_up:
            return
        server.kill()
        if loses_power:
            self.disks[index].files.lose_power()
        for wire in self.network.wires_of(None, index):
            self.network.break_wire(wire, delivers_late=False, notices_after_s=self._rng.random() * 0.5)
        self.clock.after(rests_s, self._restart_server, index)

    def _restart_server(self, index: int) -> None:
        self.network.servers[index] = self._make_server(index)
        self._begin(index)

    # ---- workers -----------------------------------------------------------------------------------------------

    def _start_worker(self, slot: Slot) -> None:
        scenario = self.scenario
        codec = resolve_codec(scenario.codec or None)
        options = SessionOptions(
            addresses=[f"tcp://10.0.0.{index}:0" for index in range(scenario.servers)],
            job="job",
            rule=self.job.rule,
            codec=only_gradients(codec) if scenario.rule == "merge" else codec,
            rank=slot.rank,
            world_size=scenario.workers,
            timeout_s=TIMEOUT_S,
            connect_timeout_s=TIMEOUT_S,
        )
        slot.process = WorkerProcess(
            self.clock,
            self.network,
            self._processes,
            slot.rank,
            options,
            self._rng.getrandbits(64),
            scenario.tick_s,
            _place_of,
            partial(self.job.program, think_s=lambda: scenario.think_s * self._rng.random()),
            self._segments_of(slot.rank, codec),
        )
        self._processes += 1

    def _segments_of(self, rank: int, codec: Codec) -> SimulatedSegments | None:
        if rank >= self.scenario.shares:
            return None
        return SimulatedSegments(self.clock, self.network.servers, _place_of, codec)

    def _operate(self) -> None:
        """Look after processes that have ended."""
        for slot in self.slots:
            process = slot.process
            if slot.is_done or (process is None and slot.rest_s is None):
                continue
            if process is not None and not process.is_dead:
                continue
            slot.process = None
            if process is not None and self.memory.has_refused(process.error):
                self._give_up()
                break
            if process is not None and process.error is not None:
                self.counts[f"worker ended: {type(process.error).__name__}"] += 1
                is_whole = len(self.network.servers) == 1 and self.scenario.rule != "average"
                is_whole = is_whole and not self.job.is_excused(0)
                if self._is_lost(process) and not is_whole:
                    self._start_anew()
                    break
                slot.rest_s = slot.rest_s or REST_S
            if process is not None and process.has_finished:
                slot.is_done = True
                continue
            rests_s, slot.rest_s = slot.rest_s or REST_S, None
            self.clock.after(rests_s, self._start_if_needed, slot)
        self._see_to_values()
        self._end_training()
        self.clock.after(OPERATOR_S, self._operate)

    def _see_to_values(self) -> None:
        """Where servers have lost a job, or what they knew of a worker, those that are trained start once more.

        Worker 0 gives the job its values. A quorum and a bound wait for all that have never come, by the rules' own
        words; nobody but an operator knows that there is nothing left to come.
        """
        if self.scenario.rule == "average":
            return
        waits = any(slot.process is not None and not slot.process.has_state for slot in self.slots)
        for server in self.network.servers:
            is_whole = self.scenario.keeps_log and not self.job.is_excused(server.index)
            if not server.is_up or is_whole or not (waits or server.has_values):
                continue
            for slot in self.slots:
                if slot.is_done and not server.has_met(slot.rank):
                    slot.is_done, slot.process, slot.rest_s = False, None, REST_S

    def _start_if_needed(self, slot: Slot) -> None:
        if not slot.is_done and slot.process is None:
            self._start_worker(slot)

    def _is_lost(self, process: WorkerProcess) -> bool:
        """Whether only an operator can help: servers have lost their part of the job."""
        error = process.error
        return isinstance(error, ServerRefusedError) and error.code == ErrorCode.STATE_LOST

    def _give_up(self) -> None:
        """The servers have too little memory for the job: it ends, and a person reads why."""
        self.counts["ended for lack of memory"] += 1
        for process in [*(slot.process for slot in self.slots), *self.zombies]:
            if process is not None and not process.is_dead:
                process.kill()
        for slot in self.slots:
            slot.is_done, slot.process = True, None

    def _start_anew(self) -> None:
        """Start all servers and workers anew, as the error says."""
        self.counts["started anew"] += 1
        for process in [*(slot.process for slot in self.slots), *self.zombies]:
            if process is not None and not process.is_dead:
                process.kill()
        for slot in self.slots:
            slot.process, slot.rest_s = None, REST_S
        for server in self.network.servers:
            if server.is_up:
                self.kill_server(server.index, 0.1)
            self.disks[server.index].clear()
            self.job.damaged(server.index, None)

    def _end_training(self) -> None:
        """Once a replica is trained, nobody waits for processes that have yet to get its state, or to get it again."""
        are_done = [slot.is_done for slot in self.slots]
        if not (any(are_done) if self.scenario.rule == "average" else all(are_done)):
            return
        for slot in self.slots:
            if slot.process is None or slot.process.needs_state:
                slot.is_done = True
        for process in [*(slot.process for slot in self.slots), *self.zombies]:
            if process is not None and not process.is_dead and process.needs_state:
                process.kill()


def _place_of(address: str) -> tuple[int, int]:
    host, _, shard = address.removeprefix("tcp://10.0.0.").partition(":")
    return int(host), int(shard)


def run(scenario: Scenario, *, traces: bool = False) -> Result:
    """Run a scenario; ``traces`` keeps what happened, and raises what is no finding of the oracle."""
    return Simulation(scenario, traces=traces).run()
