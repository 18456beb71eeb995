"""A training on hosts of its own, and the faults that befall it."""

from __future__ import annotations

import math
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from account import FaultRecord, Training
from faults import Fault
from sites import logging_to, processes_of, send, sites

FEWEST_HOSTS = 2
# A service manager starts what died again after so long.
RESTART_S = 0.3
POLL_S = 0.02
STACKS_S = 2.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Program:
    """Command lines: of the coordinator, and of what starts the worker of a host, given its place and name."""

    coordinator: list[str]
    launcher: Callable[[int, str], list[str]]


class Job:
    """A training on hosts of its own, whose launchers and coordinator are started again when they die.

    Args:
        places: hosts, the last one for the coordinator alone.
        directory: for what launchers and the coordinator write, a file for each host.
    """

    def __init__(self, places: list[Any], program: Program, directory: Path) -> None:
        self.hosts, self._coordinators = places[:-1], places[-1]
        self._program, self._directory = program, directory
        self._launchers: list[Any] = [None] * len(self.hosts)
        self._coordinator: Any = None
        self._again_s: dict[Any, float] = {}
        self.is_away = [False] * len(self.hosts)
        self.has_ended = [False] * len(self.hosts)

    def supervise(self) -> None:
        """Start what is not running."""
        if self._coordinator is None or self._is_due(self._coordinator, "coordinator"):
            self._coordinator = self._start(self._coordinators, self._program.coordinator)
        for index, launcher in enumerate(self._launchers):
            if self.has_ended[index] or self.is_away[index]:
                continue
            if launcher is not None and launcher.poll() == 0:
                self.has_ended[index] = True
            elif launcher is None or self._is_due(launcher, index):
                host = self.hosts[index]
                self._launchers[index] = self._start(host, self._program.launcher(index, host.name))

    def _start(self, host: Any, command: list[str]) -> Any:
        return host.start(logging_to(self._directory / f"{host.name}.log", command), environment=ENVIRONMENT)

    def _is_due(self, process: Any, key: Any) -> bool:
        if process.poll() is None:
            return False
        now_s = time.monotonic()
        if now_s < self._again_s.setdefault(key, now_s + RESTART_S):
            return False
        del self._again_s[key]
        return True

    def stacks(self) -> None:
        """Let each worker write where it is to its log."""
        for host in self.hosts:
            send(signal.SIGUSR1, processes_of(host.name)["worker"])
        time.sleep(STACKS_S)

    def kill_coordinator(self) -> None:
        self._coordinator.kill() if isinstance(self._coordinator, subprocess.Popen) else self._coordinator.signal(9)


class Storm:
    """Faults that befall a job.

    Attributes:
        done: those that came about.
    """

    def __init__(self, job: Job, faults: list[Fault]) -> None:
        self._job = job
        self._left = list(faults)
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self.done: list[FaultRecord] = []

    def blow(self, passed_s: float) -> None:
        """Do what is due."""
        for due_s, undo in list(self._undo):
            if passed_s >= due_s:
                undo()
                self._undo.remove((due_s, undo))
        while self._left and passed_s >= self._left[0].at_s:
            fault = self._left.pop(0)
            for index in fault.hosts:
                self._befall(fault, index)

    def calm(self) -> None:
        """Undo everything at once."""
        for _, undo in self._undo:
            undo()
        self._undo.clear()

    def _befall(self, fault: Fault, index: int) -> None:
        job, host = self._job, self._job.hosts[index]
        if job.is_away[index] or job.has_ended[index]:
            return
        running = processes_of(host.name)
        launchers, workers = running["launcher"], running["worker"]
        undo = None
        if fault.cause == "worker killed" and workers:
            send(signal.SIGKILL, workers)
        elif fault.cause == "launcher killed" and launchers:
            send(signal.SIGKILL, launchers)
        elif fault.cause == "coordinator killed":
            job.kill_coordinator()
        elif fault.cause == "worker stopped" and workers:
            send(signal.SIGSTOP, workers)
            undo = lambda: send(signal.SIGCONT, workers)  # noqa: E731
        elif fault.cause == "link cut" and hasattr(host, "cut"):
            host.cut()
            undo = host.mend
        elif fault.cause == "host left" and job.is_away.count(False) > FEWEST_HOSTS:
            job.is_away[index] = True
            send(signal.SIGKILL, launchers + workers)
            undo = lambda: job.is_away.__setitem__(index, False)  # noqa: E731
        else:
            return
        now_s = time.monotonic()
        self.done.append(FaultRecord(now_s, fault.cause, host.name, now_s + fault.lasts_s))
        if undo is not None:
            self._undo.append((fault.at_s + fault.lasts_s, undo))


def train(
    out: Path,
    program_at: Callable[[str], Program],
    faults: list[Fault],
    *,
    hosts: int,
    deadline_s: float,
    most_s: float = math.inf,
    shared: Sequence[Path] = (),
) -> tuple[Training, Storm]:
    """Through ``faults``, on so many hosts; told to stop ``most_s`` after the first step.

    Args:
        out: directory for events and logs, made here.
        program_at: the program of the job whose coordinator has this address.
        shared: folders of /tmp that it needs.

    Raises:
        TimeoutError: the training has not ended after ``deadline_s``.
    """
    out.mkdir()
    with sites(hosts + 1, [out, *shared]) as (places, address):
        job = Job(places, program_at(address), out)
        storm = Storm(job, faults)
        end_s, begun_s = time.monotonic() + deadline_s, math.inf
        try:
            while not all(job.has_ended):
                job.supervise()
                now_s = time.monotonic()
                if math.isinf(begun_s) and any(b'"step"' in path.read_bytes() for path in out.glob("*.events")):
                    begun_s = now_s
                storm.blow(now_s - begun_s)
                if now_s - begun_s > most_s:
                    (out / "stop").touch()
                if any(job.has_ended):
                    storm.calm()
                    job.is_away = [False] * hosts
                if now_s > end_s:
                    storm.calm()
                    job.stacks()
                    raise TimeoutError(f"the training has not ended after {deadline_s:g} s")
                time.sleep(POLL_S)
        finally:
            for host in job.hosts:
                running = processes_of(host.name)
                send(signal.SIGKILL, running["launcher"] + running["worker"])
    return Training.read(out), storm
