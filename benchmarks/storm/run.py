"""Trains through a storm of faults, and compares every bit with a calm day and with native DDP; see README.md.

python benchmarks/storm/run.py --minutes 2 --faults-per-hour 600 --seed 1 [--strategy sync:virtual_workers=8]
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(_ROOT / "tests"), str(_ROOT / "benchmarks"), str(Path(__file__).parent)]

from account import Training, percentile  # noqa: E402
from faults import SHARES, Fault, plan  # noqa: E402
from harness.command_line import at_least, parser_of, some_of  # noqa: E402
from harness.record import Record  # noqa: E402
from harness.tables import Table  # noqa: E402
from sites import processes_of, send, sites  # noqa: E402

QUESTION = "What is left of a training through which a storm of faults goes?"
HOSTS = VIRTUAL_WORKERS = 8
FEWEST_HOSTS = 2
LEASE_S = 2.0
EPOCHS = 2
PEER_WORKERS = 2
STRATEGY_OF_TWO = f"sync:virtual_workers={PEER_WORKERS}"
BATCH = 8
# Of the time that steps take on a calm day: what the storm leaves of it, as a guess.
GOODPUT = 0.7
CALIBRATION_STEPS = 40
POLL_S = 0.02
# A service manager starts what died again after so long.
RESTART_S = 0.3
PROGRAM = str(Path(__file__).with_name("training.py"))
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Program:
    """Command lines: of the coordinator, and of what starts the worker of a host, given its place and name."""

    coordinator: list[str]
    launcher: Callable[[int, str], list[str]]


def elastic(address: str, out: Path, arguments: list[str], strategy: str, hosts: int) -> Program:
    """psengine's."""
    port = address.rpartition(":")[2]
    bind = address if "127.0.0.1" in address else f"tcp://0.0.0.0:{port}"
    server = ["-m", "psengine.cli.server", "--bind", bind, "--insecure", "--lease-s", f"{LEASE_S:g}"]
    run = ["-m", "psengine.cli.main", "run", "--workers", "1", "--independent", "--max-restarts", "1000000"]
    run += ["--strategy", strategy, "--server-address", address, "--total-workers", str(hosts)]
    own = [str(out), *arguments, "--checkpoints", str(out / "checkpoints"), "--epochs", str(EPOCHS)]
    return Program(
        [sys.executable, *server],
        # Something follows the name, so that node-1 is not node-10.
        lambda index, name: [
            *(sys.executable, *run, "--first-worker", str(index), PROGRAM, "--host", name, *own),
        ],
    )


class Job:
    """A training on hosts of its own, whose launchers and coordinator are started again when they die.

    Args:
        places: hosts, the last one for the coordinator alone.
    """

    def __init__(self, places: list[Any], program: Program) -> None:
        self.hosts, self._coordinators = places[:-1], places[-1]
        self._program = program
        self._launchers: list[Any] = [None] * len(self.hosts)
        self._coordinator: Any = None
        self._again_s: dict[Any, float] = {}
        self.is_away = [False] * len(self.hosts)
        self.has_ended = [False] * len(self.hosts)

    def supervise(self) -> None:
        """Start what is not running."""
        if self._coordinator is None or self._is_due(self._coordinator, "coordinator"):
            self._coordinator = self._coordinators.start(self._program.coordinator, environment=ENVIRONMENT)
        for index, launcher in enumerate(self._launchers):
            if self.has_ended[index] or self.is_away[index]:
                continue
            if launcher is not None and launcher.poll() == 0:
                self.has_ended[index] = True
            elif launcher is None or self._is_due(launcher, index):
                host = self.hosts[index]
                command = self._program.launcher(index, host.name)
                self._launchers[index] = host.start(command, environment=ENVIRONMENT)

    def _is_due(self, process: Any, key: Any) -> bool:
        if process.poll() is None:
            return False
        now_s = time.monotonic()
        if now_s < self._again_s.setdefault(key, now_s + RESTART_S):
            return False
        del self._again_s[key]
        return True

    def kill_coordinator(self) -> None:
        self._coordinator.kill() if isinstance(self._coordinator, subprocess.Popen) else self._coordinator.signal(9)

    def logs(self) -> str:
        """The last lines of everybody."""
        texts = [
            f"--- {getattr(p, 'host', '')}\n{getattr(p, 'stdout', '')[-1500:]}\n{getattr(p, 'stderr', '')[-3000:]}"
            for p in [*self._launchers, self._coordinator]
            if p is not None and not isinstance(p, subprocess.Popen)
        ]
        return "\n".join(texts)


class Storm:
    """Faults that befall a job."""

    def __init__(self, job: Job, faults: list[Fault]) -> None:
        self._job = job
        self._left = list(faults)
        self._undo: list[tuple[float, Any]] = []
        # (time, cause, name of the host) of each that came about.
        self.done: list[tuple[float, str, str]] = []

    def blow(self, passed_s: float) -> None:
        """Do what is due."""
        for due_s, undo in list(self._undo):
            if passed_s >= due_s:
                undo()
                self._undo.remove((due_s, undo))
        while self._left and passed_s >= self._left[0].at_s:
            self._befall(self._left.pop(0))

    def calm(self) -> None:
        """Undo everything at once."""
        for _, undo in self._undo:
            undo()
        self._undo.clear()

    def _befall(self, fault: Fault) -> None:
        job, host = self._job, self._job.hosts[fault.host]
        if job.is_away[fault.host] or job.has_ended[fault.host]:
            return
        running = processes_of(host.name)
        undo = None
        if fault.cause == "worker killed":
            send(signal.SIGKILL, running["worker"])
        elif fault.cause == "launcher killed":
            send(signal.SIGKILL, running["launcher"])
        elif fault.cause == "coordinator killed":
            job.kill_coordinator()
        elif fault.cause == "worker stopped":
            send(signal.SIGSTOP, running["worker"])
            undo = lambda: send(signal.SIGCONT, running["worker"])  # noqa: E731
        elif fault.cause == "link cut" and hasattr(host, "cut"):
            host.cut()
            undo = host.mend
        elif fault.cause == "host left" and job.is_away.count(False) > FEWEST_HOSTS:
            job.is_away[fault.host] = True
            send(signal.SIGKILL, running["launcher"] + running["worker"])
            undo = lambda: job.is_away.__setitem__(fault.host, False)  # noqa: E731
        else:
            return
        self.done.append((time.monotonic(), fault.cause, host.name))
        if undo is not None:
            self._undo.append((fault.at_s + fault.lasts_s, undo))


def be_native(out: Path, arguments: list[str]) -> Training:
    """The oracle: torch's DistributedDataParallel, one rank for each virtual worker."""
    out.mkdir()
    command = [sys.executable, "-m", "psengine.cli.main", "run", "--workers", str(VIRTUAL_WORKERS), PROGRAM, str(out)]
    native = [*arguments, "--epochs", str(EPOCHS), "--native"]
    subprocess.run([*command, *native], check=True, env={**os.environ, **ENVIRONMENT})
    return Training.read(out)


def train(
    out: Path,
    program_at: Callable[[str], Program],
    faults: list[Fault],
    *,
    hosts: int = HOSTS,
    deadline_s: float,
    most_s: float = math.inf,
) -> tuple[Training, Storm]:
    """Through ``faults``, on so many hosts; told to stop ``most_s`` after the first step.

    Args:
        out: directory for the events, made here.
        program_at: the program of the job whose coordinator has this address.
    """
    out.mkdir()
    with sites(hosts + 1, out) as (places, address):
        job = Job(places, program_at(address))
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
                    raise TimeoutError(f"the training has not ended after {deadline_s} s\n{job.logs()}")
                time.sleep(POLL_S)
        finally:
            for host in job.hosts:
                running = processes_of(host.name)
                send(signal.SIGKILL, running["launcher"] + running["worker"])
    return Training.read(out), storm


def main() -> None:
    parser = parser_of(__doc__, rounds=1, quick="twenty seconds")
    add = parser.add_argument
    add("--minutes", type=float, default=2.0, help="of the storm, about (default: 2)")
    add("--faults-per-hour", type=float, default=600.0)
    add("--seed", type=int, default=1)
    add("--strategy", default=f"sync:virtual_workers={VIRTUAL_WORKERS}")
    add("--causes", type=some_of(list(SHARES)), default=tuple(SHARES), help="some of %(default)s")
    add("--steps", type=at_least(EPOCHS), help="default: as many as fit")
    add("--torchft", type=Path, metavar="PYTHON", help="an interpreter with torchft: the table beside it")
    options = parser.parse_args()
    if options.quick:
        options.minutes = 1 / 3
    record = Record.begin("storm", QUESTION, options)
    with tempfile.TemporaryDirectory(prefix="psengine-storm-") as directory:
        code = compare(Path(directory), options, record)
        if options.torchft is not None:
            record.tables.append(beside_torchft(Path(directory), options))
    record.finish()
    sys.exit(code)


def faults_of(options: argparse.Namespace, hosts: int, causes: Sequence[str]) -> list[Fault]:
    return plan(
        options.seed,
        per_hour=options.faults_per_hour,
        lease_s=LEASE_S,
        hosts=hosts,
        most_s=options.minutes * 60,
        causes=causes,
    )


def compare(directory: Path, options: argparse.Namespace, record: Record) -> int:
    """Train three times, and say what came of it; the exit code."""

    def size(steps: int) -> list[str]:
        # The last step of an epoch is not full.
        samples = steps // EPOCHS * VIRTUAL_WORKERS * BATCH - 5
        return ["--batch", str(BATCH), "--samples", str(samples)]

    def run(name: str, arguments: list[str], faults: list[Fault]) -> tuple[Training, Storm]:
        out = directory / name
        return train(
            out,
            lambda address: elastic(address, out, arguments, options.strategy, HOSTS),
            faults,
            deadline_s=options.deadline,
        )

    steps = options.steps
    if steps is None:
        calibration, _ = run("calibration", size(CALIBRATION_STEPS), [])
        steps = max(CALIBRATION_STEPS, int(calibration.steps_per_s * options.minutes * 60 * GOODPUT))
    arguments = size(steps)
    samples = int(arguments[3])
    native = be_native(directory / "native", arguments)
    calm, _ = run("calm", arguments, [])
    found, storm = run("storm", arguments, faults_of(options, HOSTS, options.causes))
    goodput = found.steps_per_s / calm.steps_per_s
    once, all_samples = found.samples_once(samples, EPOCHS), samples * EPOCHS
    stalls = {cause: [found.stall_s(at_s) for at_s, of, _ in storm.done if of == cause] for cause in SHARES}
    together = [stall for some in stalls.values() for stall in some]
    is_true = len(found.weights) == 1 and found.weights == calm.weights == native.weights and once == all_samples

    def said(training: Training) -> str:
        return " and ".join(sorted(one[:8] + "..." for one in training.weights)) or "none"

    def compared(other: Training, name: str) -> str:
        return f"= {name}" if found.weights == other.weights else f"but {said(other)} of {name}"

    print(
        f"weights sha256 {said(found)} {compared(calm, 'undisturbed')}"
        f" {compared(native, f'native DDP with {VIRTUAL_WORKERS} ranks')};"
        f" samples once: {once:,} of {all_samples:,}; faults {len(storm.done)}; goodput {goodput:.0%};"
        f" stall median {statistics.median(together or [0]):.1f} s, p99 {percentile(together or [0], 0.99):.1f} s"
    )
    rows = [
        [cause, len(some), f"{statistics.median(some):.2f} s", f"{max(some):.2f} s", _again(found, storm, cause)]
        for cause, some in stalls.items()
        if some
    ]
    record.tables.append(Table("", ["fault", "times", "stall, median", "longest", "next contribution, median"], rows))
    record.values |= {"steps": steps, "steps a second": found.steps_per_s, "calm": calm.steps_per_s}
    return 0 if is_true else 1


def _again(found: Training, storm: Storm, cause: str) -> str:
    times = [found.next_contribution_s(host, at_s) for at_s, of, host in storm.done if of == cause]
    known = [time_s for time_s in times if time_s is not None]
    return f"{statistics.median(known):.1f} s" if cause == "worker killed" and known else "-"


# ---- the peer --------------------------------------------------------------------------------------------------------


def torchft(python: Path, address: str, out: Path, samples: int, batch: int) -> Program:
    """torchft's: a lighthouse for the coordinator, torchrun for the launcher."""
    port = address.rpartition(":")[2]
    # As torchft's README starts it, with our lease.
    limits = ["--quorum_tick_ms", "100", "--join_timeout_ms", "10000", "--heartbeat_timeout_ms", f"{LEASE_S * 1000:g}"]
    own = ["--out", str(out), "--samples", str(samples), "--batch", str(batch)]
    torchrun = [str(python), "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1000000"]
    environment = ["env", f"TORCHFT_LIGHTHOUSE={address.replace('tcp', 'http')}"]
    program = str(Path(PROGRAM).with_name("torchft_training.py"))
    return Program(
        [str(python.with_name("torchft_lighthouse")), "--min_replicas", "1", "--bind", f"[::]:{port}", *limits],
        lambda index, name: [*environment, *torchrun, program, "--host", name, *own, "--replica", str(index)],
    )


def beside_torchft(directory: Path, options: argparse.Namespace) -> Table:
    """Both through the same kills of workers, with two workers and the same batches."""
    samples, batch, most_s = 40_000, VIRTUAL_WORKERS // PEER_WORKERS * BATCH, options.minutes * 60
    kills = faults_of(options, PEER_WORKERS, ["worker killed"])
    own = ["--batch", str(batch), "--samples", str(samples)]
    programs = {
        "psengine": lambda out: lambda address: elastic(address, out, own, STRATEGY_OF_TWO, PEER_WORKERS),
        "torchft": lambda out: lambda address: torchft(options.torchft, address, out, samples, batch),
    }
    rows = []
    for name, program_of in programs.items():
        trainings = []
        for kind, faults in (("calm", []), ("storm", kills)):
            out = directory / f"{name}-{kind}"
            end = {"hosts": PEER_WORKERS, "deadline_s": options.deadline, "most_s": most_s}
            trainings.append(train(out, program_of(out), faults, **end))
        (calm, _), (found, storm) = trainings
        stalls = [found.stall_s(at_s) for at_s, _, _ in storm.done] or [0.0]
        # What torchft writes down with a step is how many replicas took part.
        left_out = sum(batch * (PEER_WORKERS - count) for count in found.numbers.values()) if name == "torchft" else 0
        rows.append(
            [
                *(name, f"{calm.steps_per_s:.1f}", f"{found.steps_per_s:.1f}"),
                *(f"{found.steps_per_s / calm.steps_per_s:.0%}", len(storm.done)),
                *(f"{statistics.median(stalls):.2f} s", f"{max(stalls):.2f} s", _again(found, storm, "worker killed")),
                f"{left_out:,.0f} of {len(found.numbers) * batch * PEER_WORKERS:,}",
            ]
        )
    columns = ["", "steps a second, calm", "in the storm", "goodput", "kills", "stall, median", "longest"]
    columns += ["next contribution, median", "samples left out"]
    return Table("Two workers, kills of workers alone", columns, rows)


if __name__ == "__main__":
    main()
