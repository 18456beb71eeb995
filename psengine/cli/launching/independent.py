"""Workers that know each other only through the parameter servers: the death of one does not end the others."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from psengine.cli.launching.deaths import DeathWatch
from psengine.cli.launching.failure import RankEnd, describe_exit, failure_time, last_traceback
from psengine.cli.launching.interruption import kill_group
from psengine.cli.launching.output import WorkerOutput
from psengine.environment.launchers import PLACEMENT_VARIABLES
from psengine.errors import ConfigurationError

_POLL_S = 0.1


class IndependentWorkers:
    """As many workers as told, each a world of its own; ``run`` is their life.

    Args:
        command: program and arguments.
        ranks: of the workers.
        environment: of this process.
        variables: set in each worker; besides PSENGINE_WORKER, its rank.
        devices: one CUDA device for each worker; () where there are none.
        max_restarts: how often each may be started again.
        shutdown_s: between the signal that asks and the one that does not.
        output: takes what they write.
        report: takes a line about a worker that is started again.

    Attributes:
        ends: how each worker ended, its last life.
    """

    def __init__(
        self,
        command: Sequence[str],
        ranks: range,
        *,
        environment: Mapping[str, str],
        variables: Mapping[str, str],
        devices: Sequence[str],
        max_restarts: int,
        shutdown_s: float,
        output: WorkerOutput,
        report: Callable[[str], None],
    ) -> None:
        self.ends: list[RankEnd] = []
        self._command = list(command)
        self._ranks = ranks
        # A process that another launcher (srun, mpirun) placed would believe that it is one of that world.
        own = {name: value for name, value in environment.items() if name not in PLACEMENT_VARIABLES}
        self._environment = own | dict(variables)
        self._devices = devices
        self._max_restarts = max_restarts
        self._shutdown_s = shutdown_s
        self._output = output
        self._report = report
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._restarts = dict.fromkeys(ranks, 0)
        self._watch = DeathWatch()

    def run(self) -> None:
        """Start the workers and wait until the last has ended, for good.

        Raises:
            ConfigurationError: the program cannot be started.
            Interrupted: a signal came; the workers have been ended.
        """
        with self._watch:
            number: int = signal.SIGTERM
            try:
                for rank in self._ranks:
                    self._start(rank)
                while self._processes:
                    for rank, process in list(self._processes.items()):
                        if process.poll() is not None:
                            self._ended(rank, process)
                    time.sleep(_POLL_S)
            except BaseException as error:
                number = getattr(error, "sigval", number)
                raise
            finally:
                self._shut_down(number)

    def kill(self) -> None:
        """End all workers at once."""
        for process in list(self._processes.values()):
            kill_group(process.pid, signal.SIGKILL)

    def _start(self, rank: int) -> None:
        environment = {**self._environment, "PSENGINE_WORKER": str(rank)}
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
        self._watch.add(process.pid)

    def _ended(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        del self._processes[rank]
        end = self._describe(rank, process)
        if end.exit_code != 0 and self._restarts[rank] < self._max_restarts:
            self._restarts[rank] += 1
            self._report(
                f"worker {rank} ended ({describe_exit(end.exit_code)}); starting it again"
                f" ({self._restarts[rank]} of {self._max_restarts})"
            )
            self._start(rank)
            return
        self.ends = sorted([*self.ends, end], key=lambda one: one.rank)

    def _describe(self, rank: int, process: subprocess.Popen[bytes]) -> RankEnd:
        self._watch.settle()
        self._output.drain()
        ended_s = self._watch.ended_s.get(process.pid, time.time())
        spoke_s, traceback = last_traceback(self._output.stderr_of(rank))
        exit_code = process.returncode
        return RankEnd(
            rank=rank,
            local_rank=rank - self._ranks.start,
            host=socket.gethostname(),
            pid=process.pid,
            exit_code=exit_code,
            ended_s=ended_s,
            failed_s=failure_time(exit_code, spoke_s, ended_s),
            traceback=traceback,
            restarts=self._restarts[rank],
        )

    def _shut_down(self, number: int) -> None:
        for process in self._processes.values():
            kill_group(process.pid, number)
        deadline_s = time.monotonic() + self._shutdown_s
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                kill_group(process.pid, signal.SIGKILL)
                process.wait(self._shutdown_s)


def visible_devices(count: int, named: str | None) -> tuple[str, ...]:
    """The CUDA devices that workers may have: those of CUDA_VISIBLE_DEVICES, else all ``count``."""
    if named:
        return tuple(part.strip() for part in named.split(",") if part.strip())
    return tuple(str(index) for index in range(count))


def python_command(script: Sequence[str], *, is_module: bool, has_python: bool) -> list[str]:
    """What the shell would run for ``script``, unbuffered as torchrun does."""
    if not has_python:
        return list(script)
    return [sys.executable, "-u", *(["-m"] if is_module else []), *script]
