"""Workers that know each other only through the parameter servers: the death of one does not end the others."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from psengine.cli.launching.deaths import DeathWatch
from psengine.cli.launching.failure import RankEnd, describe_end, describe_exit
from psengine.cli.launching.interruption import kill_group
from psengine.cli.launching.output import WorkerOutput
from psengine.environment.launchers import PLACEMENT_VARIABLES
from psengine.errors import ConfigurationError

_JOIN_S = 2.0


class IndependentWorkers:
    """Workers of which each is a world of its own.

    Args:
        command: program and arguments.
        ranks: of the workers.
        environment: of this process.
        variables: set in each worker; besides PSENGINE_WORKER, its rank.
        devices: one CUDA device for each worker; () where there are none.
        max_restarts: how often each may be started again.
        output: takes what they write.
        report: takes a line about a worker that is started again.

    Attributes:
        ends: how the last life of each worker ended.
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
        output: WorkerOutput,
        report: Callable[[str], None],
    ) -> None:
        self.ends: list[RankEnd] = []
        self._command = command
        self._ranks = ranks
        # A process that another launcher (srun, mpirun) placed would believe that it is one of that world.
        own = {name: value for name, value in environment.items() if name not in PLACEMENT_VARIABLES}
        self._environment = own | dict(variables)
        self._devices = devices
        self._max_restarts = max_restarts
        self._output = output
        self._report = report
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._restarts = dict.fromkeys(ranks, 0)
        self._watch = DeathWatch()
        self._is_stopping = False

    def start(self) -> None:
        """Start the workers.

        Raises:
            ConfigurationError: the program cannot be started.
        """
        for rank in self._ranks:
            self._start(rank)

    def is_running(self) -> bool:
        """Whether a worker runs; those that died are started again."""
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
        self._is_stopping = True
        for process in list(self._processes.values()):
            kill_group(process.pid, signal.SIGKILL)

    def finish(self) -> None:
        """Wait for workers that were killed."""
        for process in self._processes.values():
            process.wait(_JOIN_S)
        self.is_running()
        self.ends.sort(key=lambda end: end.rank)

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

    def _end(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        del self._processes[rank]
        code = process.returncode
        if code != 0 and not self._is_stopping and self._restarts[rank] < self._max_restarts:
            self._restarts[rank] += 1
            self._report(
                f"worker {rank} ended ({describe_exit(code)}); starting it again"
                f" ({self._restarts[rank]} of {self._max_restarts})"
            )
            self._start(rank)
            return
        if self._is_stopping:
            return  # it ended as it was told to
        self._watch.settle(process.pid)
        self.ends.append(
            describe_end(
                rank,
                rank - self._ranks.start,
                process.pid,
                code,
                stderr=self._output.last_lines(rank),
                ended_s=self._watch.ended_s.get(process.pid),
                restarts=self._restarts[rank],
            )
        )


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
