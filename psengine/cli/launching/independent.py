"""Workers that know each other only through the parameter servers: the death of one does not end the others."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import torch

from psengine.cli.launching.failure import RankEnd, describe_exit, failure_time, last_traceback
from psengine.cli.launching.interruption import Interruption
from psengine.cli.launching.memory_kills import MemoryKills
from psengine.cli.launching.output import WorkerOutput
from psengine.cli.launching.plan import Plan
from psengine.cli.launching.processes import kill_group
from psengine.environment.launchers import PLACEMENT_VARIABLES, WORKER, WORKERS
from psengine.environment.variables import inherited_variables
from psengine.errors import ConfigurationError

_JOIN_S = 2.0


class IndependentWorkers:
    """Workers of which each is a world of its own: PSENGINE_WORKER is its number, of PSENGINE_WORKERS in the job.

    Attributes:
        ends: how the last process of each worker ended.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        variables: Mapping[str, str],
        output: WorkerOutput,
        report: Callable[[str], None],
        interruption: Interruption,
    ) -> None:
        self.ends: list[RankEnd] = []
        options = plan.torchrun
        # Unbuffered, as under torchrun.
        python = [] if options.no_python else [sys.executable, "-u", *(["-m"] if options.module else [])]
        self._command = [*python, *plan.script]
        self._ranks = plan.ranks
        inherited = inherited_variables()
        # A process that another launcher (srun, mpirun) placed would believe that it is one of that world.
        own = {name: value for name, value in inherited.items() if name not in PLACEMENT_VARIABLES}
        self._environment = own | dict(variables) | {WORKERS: str(plan.total_workers)}
        devices = inherited.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        self._devices = [device.strip() for device in devices.split(",") if device.strip()]
        self._max_restarts: int = options.max_restarts
        self._output = output
        self._report = report
        self._interruption = interruption
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._restarts = dict.fromkeys(plan.ranks, 0)
        self._is_stopping = False
        self._memory_kills = MemoryKills()

    def start(self) -> None:
        """Start the workers.

        Raises:
            ConfigurationError: the program cannot be started.
        """
        for rank in self._ranks:
            self._start(rank)

    def is_running(self) -> bool:
        """Whether a worker runs; starts those again that died."""
        for rank, process in list(self._processes.items()):
            if process.poll() is not None:
                self._end(rank, process)
        return bool(self._processes)

    def lost_node(self) -> bool:
        """Independent workers have no other nodes."""
        return False

    def stop(self, number: int) -> None:
        """Pass a signal on to the workers; none is started again."""
        self._is_stopping = True
        for process in self._processes.values():
            kill_group(process.pid, number)

    def kill(self) -> None:
        """End all workers at once."""
        self.stop(signal.SIGKILL)

    def finish(self) -> None:
        """Wait for workers that were killed."""
        for process in self._processes.values():
            process.wait(_JOIN_S)
        self.is_running()
        self.ends.sort(key=lambda end: end.rank)

    def _start(self, rank: int) -> None:
        environment = {**self._environment, WORKER: str(rank)}
        if self._devices:
            environment["CUDA_VISIBLE_DEVICES"] = self._devices[(rank - self._ranks.start) % len(self._devices)]
        paths = [self._output.pipe(rank, is_stderr=is_stderr) for is_stderr in (False, True)]
        with open(paths[0], "wb", buffering=0) as stdout, open(paths[1], "wb", buffering=0) as stderr:
            try:
                process = subprocess.Popen(
                    self._command, env=environment, stdout=stdout, stderr=stderr, start_new_session=True
                )
            except OSError as error:
                raise ConfigurationError(f"{self._command[0]} could not be started: {error}") from error
        self._processes[rank] = process

    def _end(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        del self._processes[rank]
        code, restarts = process.returncode, self._restarts[rank]
        if self._is_stopping or self._interruption.received is not None:
            return  # it ended as it was told to; Slurm signals workers and launcher at once
        was_short_of_memory = self._memory_kills.have_grown()
        how = describe_exit(code, was_short_of_memory)
        if code != 0 and restarts < self._max_restarts:
            self._restarts[rank] += 1
            self._report(f"worker {rank} ended ({how}); starting it again ({restarts + 1} of {self._max_restarts})")
            self._start(rank)
            return
        if code != 0:
            self._report(f"worker {rank} ended ({how}); the others go on")
        spoke_s, traceback = last_traceback(self._output.last_lines(rank))
        self.ends.append(
            RankEnd(
                rank=rank,
                local_rank=rank - self._ranks.start,
                pid=process.pid,
                exit_code=code,
                failed_s=failure_time(code, spoke_s, time.time()),
                traceback=traceback,
                restarts=restarts,
                is_independent=True,
                was_short_of_memory=was_short_of_memory,
            )
        )
