"""What a slow worker costs the others: four workers, one of them four times slower, under each strategy in turn.

python benchmarks/straggler/run.py [--quick] [--candidates sync,async] [--straggler turns] [--plot FILE] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import psengine
from psengine.parameter_server.client.embedded import EmbeddedServer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import pictures
from harness.command_line import parser_of, some_of
from harness.record import Record
from harness.tables import Table
from harness.turns import order_of
from idx_images import IdxError, read_split

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # where Debian's dataset-fashion-mnist puts it
PIXEL_MEAN, PIXEL_DEVIATION = 0.286, 0.353
QUESTION = "What does one slow worker cost the others?"
WORLD_SIZE = 4
BATCH_SIZE = 128  # of each worker
WARM_UP_STEPS = 5
SNAPSHOT_S = 0.5
SMOOTHED = 5  # snapshots
GROUP_TIMEOUT_S = 60
START_S = 60

# Adam's learning rate and beta1, its momentum. ALIKE is the best of a sweep for "sync". An asynchronous update is one
# worker's gradient, so the advice is a rate divided by the number of workers, and less momentum, because old gradients
# act like it (Mitliagkas et al. 2016, https://arxiv.org/abs/1605.09774). What happens to a script that does neither, or
# only the first?
ALIKE = (0.006, 0.9)
DIVIDED = (0.0015, 0.9)
ADVISED = (0.0015, 0.0)
CANDIDATES = {  # name -> what each is run with
    "native": (ALIKE,),
    "sync": (ALIKE,),
    "sync-server": (ALIKE,),
    "sync-server:quorum=3": (ALIKE,),
    "async": (ALIKE, DIVIDED, ADVISED),
    "async:max_staleness=4": (ALIKE, DIVIDED, ADVISED),
    "async:max_staleness=16": (ADVISED,),
    "async:staleness_scaling=inverse": (ALIKE, DIVIDED, ADVISED),
    "async:delay_compensation=0.04": (ALIKE, DIVIDED, ADVISED),
}
REFERENCE = "sync"
# Ranks of these cannot leave one by one.
IN_A_GROUP = ("native", "sync")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run of one candidate.

    Attributes:
        straggler: "one": the last rank is slow in every step; "turns": each is in every fourth of its steps; "none".
        step_s: how long a worker that is not slow computes; ``slowdown`` times that where it is.
    """

    candidate: str
    learning_rate: float
    beta1: float
    seed: int
    duration_s: float
    straggler: str
    step_s: float
    slowdown: float


@dataclass(kw_only=True)
class Run:
    """What came of a plan.

    Attributes:
        samples_per_s: of all workers, those whose gradient came too late for a quorum left out.
        steps: of each worker, in rank order.
        curve: [seconds, test accuracy] of rank 0's weights.
        dropped: part of the gradients that came too late for a quorum.
        staleness: how many updates old the weights of an applied gradient were, on average; None where there is none.
    """

    candidate: str
    learning_rate: float
    beta1: float
    samples_per_s: float
    steps: list[int]
    curve: list[tuple[float, float]]
    dropped: float
    staleness: float | None

    def seconds_to(self, accuracy: float) -> float:
        """When the median of ``SMOOTHED`` successive accuracies was reached first; infinite if it was not.

        The first single one would flatter a curve that swings.
        """
        windows = zip(*(self.curve[start:] for start in range(SMOOTHED)), strict=False)
        reached = (w[-1][0] for w in windows if statistics.median(value for _, value in w) >= accuracy)
        return next(reached, float("inf"))

    def final_accuracy(self) -> float:
        """Mean over the last tenth of the run, at least ``SMOOTHED`` snapshots."""
        return statistics.mean(value for _, value in self.curve[-max(SMOOTHED, len(self.curve) // 10) :])


# ---- on a worker ---------------------------------------------------------------------------------------------------


@dataclass
class Data:
    """Float images, shape (count, 784), and labels."""

    images: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def load(cls, directory: Path, split: str, every: slice = slice(None)) -> Data:
        images, labels = read_split(directory, split)
        return cls((images[every].flatten(1) / 255 - PIXEL_MEAN) / PIXEL_DEVIATION, labels[every].long())


def build() -> nn.Module:
    """100 000 parameters: under 2 ms of computing, so that two cores are enough for four workers."""
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def wrap(plan: Plan) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(plan.seed)
    network = build()
    optimizer = torch.optim.Adam(network.parameters(), lr=plan.learning_rate, betas=(plan.beta1, 0.999))
    if plan.candidate == "native":
        return nn.parallel.DistributedDataParallel(network), optimizer
    model = psengine.DistributedDataParallel(network, strategy=plan.candidate)
    return model, psengine.DistributedOptimizer(optimizer, model)


def compute_s(plan: Plan, rank: int, step: int) -> float:
    """How long this step's computing is to take."""
    slow_rank = {"one": WORLD_SIZE - 1, "turns": step % WORLD_SIZE, "none": None}[plan.straggler]
    return plan.step_s * (plan.slowdown if rank == slow_rank else 1)


@dataclass
class Timed:
    """What one worker did within the measured time."""

    steps: int = 0
    snapshots: list[tuple[float, list[torch.Tensor]]] = field(default_factory=list)


def train(plan: Plan, rank: int, data: Data, last_step: Any) -> tuple[Timed, psengine.Statistics | None]:
    """Train for ``plan.duration_s``; return what was done, and the servers' statistics of the job (on rank 0)."""
    model, optimizer = wrap(plan)
    generator = torch.Generator().manual_seed(1000 * plan.seed + rank)
    timed, started_s = Timed(), 0.0
    for step in itertools.count():
        if step == WARM_UP_STEPS:
            last_step.value = -1
            dist.barrier()
            started_s = next_snapshot_s = time.monotonic()
        is_timed = step >= WARM_UP_STEPS
        if is_timed and rank == 0 and time.monotonic() - started_s >= plan.duration_s:
            # Nobody in a group is further than this step, because rank 0 has not taken part in it.
            last_step.value = step
        take_step(plan, rank, step, model, optimizer, data, generator)
        now_s = time.monotonic()
        if is_timed and now_s - started_s < plan.duration_s:
            timed.steps += 1
            if rank == 0 and now_s >= next_snapshot_s:
                next_snapshot_s += SNAPSHOT_S
                weights = [parameter.detach().clone() for parameter in model.parameters()]
                timed.snapshots.append((now_s - started_s, weights))
        if plan.candidate in IN_A_GROUP:
            if 0 <= last_step.value <= step:
                break
        elif is_timed and now_s - started_s >= plan.duration_s:
            break
    statistics: psengine.Statistics | None = None
    if plan.candidate not in IN_A_GROUP and rank == 0:
        statistics = model.statistics()
    if plan.candidate != "native":
        model.leave()
    return timed, statistics


def take_step(
    plan: Plan,
    rank: int,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Data,
    generator: torch.Generator,
) -> None:
    """A step whose forward takes as long as the plan says. The backward is real, because it exchanges gradients."""
    ready_s = time.monotonic() + compute_s(plan, rank, step)
    picked = torch.randint(len(data.labels), (BATCH_SIZE,), generator=generator)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data.images[picked]), data.labels[picked])
    time.sleep(max(0.0, ready_s - time.monotonic()))
    loss.backward()
    optimizer.step()


@torch.no_grad()
def curve_of(snapshots: list[tuple[float, list[torch.Tensor]]], test: Data) -> list[tuple[float, float]]:
    """Seconds and test accuracy of each snapshot."""
    model, curve = build(), []
    for second, weights in snapshots:
        for parameter, values in zip(model.parameters(), weights, strict=True):
            parameter.copy_(values)
        correct = (model(test.images).argmax(dim=1) == test.labels).float().mean()
        curve.append((second, correct.item()))
    return curve


def rank_main(rank: int, port: int, server: str, directory: Path, last_step: Any, pipe: Connection) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["PSENGINE_SERVERS"] = server
    train_data = Data.load(directory, "train", slice(rank, None, WORLD_SIZE))
    test_data = Data.load(directory, "test") if rank == 0 else None
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timeout)
    try:
        for run in itertools.count():
            # The servers keep the jobs of earlier runs, which have other rules.
            os.environ["PSENGINE_JOB"] = f"straggler-{run}"
            plan = pipe.recv()
            if plan is None:
                break
            timed, statistics = train(plan, rank, train_data, last_step)
            # The clock has stopped: now there is time to evaluate.
            curve = [] if test_data is None else curve_of(timed.snapshots, test_data)
            pipe.send((timed.steps, curve, statistics))
    finally:
        dist.destroy_process_group()


# ---- here ----------------------------------------------------------------------------------------------------------


class Workers:
    """Four processes that carry out one plan after the other; a context manager."""

    def __init__(self, directory: Path, server: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._last_step = context.Value("q", -1)  # kept: children unpickle it by name
        self._processes, self._pipes = [], []
        for rank in range(WORLD_SIZE):
            pipe, theirs = context.Pipe()
            arguments = (rank, self._store.port, server, directory, self._last_step, theirs)
            process = context.Process(target=rank_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(pipe)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            if kind is None:
                pipe.send(None)
                process.join(timeout=10)
            if process.is_alive():
                process.kill()
            process.join(timeout=10)
            process.close()
            pipe.close()

    def run(self, plan: Plan) -> Run:
        """Raises TimeoutError, or RuntimeError where a worker died."""
        for pipe in self._pipes:
            pipe.send(plan)
        deadline_s = time.monotonic() + plan.duration_s + START_S
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not wait([pipe], timeout=max(0.0, deadline_s - time.monotonic())):
                raise TimeoutError(f"{plan.candidate}: rank {rank} did not finish in time")
            try:
                answers.append(pipe.recv())
            except (EOFError, ConnectionError):
                raise RuntimeError(f"{plan.candidate}: rank {rank} died; its traceback is above") from None
        steps = [count for count, _, _ in answers]
        _, curve, job = answers[0]
        dropped, staleness = 0.0, None
        if job is not None and job.strategy == "sync-server":
            dropped = job.late / max(1, job.late + job.updates)
        elif job is not None:
            counts = job.staleness
            staleness = sum(age * count for age, count in counts.items()) / max(1, sum(counts.values()))
        samples_per_s = sum(steps) * BATCH_SIZE * (1 - dropped) / plan.duration_s
        return Run(
            candidate=plan.candidate,
            learning_rate=plan.learning_rate,
            beta1=plan.beta1,
            samples_per_s=samples_per_s,
            steps=steps,
            curve=curve,
            dropped=dropped,
            staleness=staleness,
        )


def table_of(runs: Sequence[Run], target: float) -> Table:
    """Medians over each candidate's runs."""
    columns = ["candidate", "rate, beta1", "samples/s (lowest-highest)", f"of {REFERENCE}", f"seconds to {target:.0%}"]
    columns += ["accuracy at the end (lowest-highest)", "steps of each worker", "notes"]
    rows = []
    reference_rates = [run.samples_per_s for run in runs if run.candidate == REFERENCE]
    for (name, learning_rate, beta1), own in in_rows(runs).items():
        rates = [run.samples_per_s for run in own]
        ratio = "-"
        if reference_rates and name != REFERENCE:
            ratio = f"{statistics.median(rates) / statistics.median(reference_rates):.2f}"
        seconds = statistics.median(run.seconds_to(target) for run in own)
        accuracies = [run.final_accuracy() for run in own]
        notes = []
        if own[0].staleness is not None:
            notes.append(f"staleness {statistics.mean(run.staleness or 0 for run in own):.1f}")
        if any(run.dropped for run in own):
            notes.append(f"{statistics.mean(run.dropped for run in own):.0%} dropped")
        steps = zip(*(run.steps for run in own), strict=True)
        rows.append(
            [
                name,
                f"{learning_rate:g}, {beta1:g}",
                f"{statistics.median(rates):.0f} ({min(rates):.0f}-{max(rates):.0f})",
                ratio,
                f"{seconds:.1f}" if seconds < float("inf") else "not reached",
                f"{statistics.median(accuracies):.1%} ({min(accuracies):.1%}-{max(accuracies):.1%})",
                ", ".join(f"{statistics.median(counts):.0f}" for counts in steps),
                ", ".join(notes),
            ]
        )
    return Table("", columns, rows)


def in_rows(runs: Sequence[Run]) -> dict[tuple[str, float, float], list[Run]]:
    """(candidate, learning rate, beta1) -> its runs, rows in the order of their first run."""
    rows: dict[tuple[str, float, float], list[Run]] = {}
    for run in runs:
        rows.setdefault((run.candidate, run.learning_rate, run.beta1), []).append(run)
    return rows


def plot(runs: Sequence[Run], target: float, path: Path) -> None:
    """Test accuracy against wall time: the median over a candidate's runs, and between which it lay."""
    pyplot = pictures.require_matplotlib()
    import numpy as np

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    # Of each candidate its last settings: the advised ones where there are several.
    for name, own in {name: own for (name, _, _), own in in_rows(runs).items()}.items():
        curves = [np.array(run.curve) for run in own]
        seconds = np.arange(0, min(curve[-1, 0] for curve in curves), SNAPSHOT_S)
        values = np.stack([np.interp(seconds, *curve.T) for curve in curves])
        (line,) = axes.plot(seconds, np.median(values, axis=0), label=name, linewidth=1.5)
        axes.fill_between(seconds, values.min(axis=0), values.max(axis=0), color=line.get_color(), alpha=0.15)
    axes.axhline(target, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xlabel="seconds", ylabel="test accuracy", ylim=(0.6, 0.9), title="Fashion-MNIST, one worker of four slow")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    pictures.save(figure, path)


def settings_of(name: str, options: argparse.Namespace) -> list[tuple[float, float]]:
    """(learning rate, beta1) of each of a candidate's rows."""
    settings = [
        (
            rate if options.learning_rate is None else options.learning_rate,
            beta1 if options.beta1 is None else options.beta1,
        )
        for rate, beta1 in CANDIDATES[name]
    ]
    return list(dict.fromkeys(settings))


def parse_options() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=3, quick="one run of 6 seconds of each, so accuracy means little")
    add = parser.add_argument
    add("--candidates", type=some_of(list(CANDIDATES)), default=tuple(CANDIDATES), help="comma-separated")
    add("--seconds", type=float, default=30.0, help="length of a run (default: %(default)s)")
    add(
        "--straggler",
        choices=("one", "turns", "none"),
        default="one",
        help="the last worker is slow (default), each is now and then, or none is",
    )
    add("--step-ms", type=float, default=40.0, help="computing time of a step (default: %(default)s)")
    add("--slowdown", type=float, default=4.0, help="how many times slower a slow step is (default: %(default)s)")
    add("--target", type=float, default=0.85, help="test accuracy to be reached (default: %(default)s)")
    add("--learning-rate", type=float, help="one for all, for sweeps (default: those in CANDIDATES)")
    add("--beta1", type=float, help="one for all, likewise")
    add("--seed", type=int, default=0, help="of the first round; each has its own (default: %(default)s)")
    add("--data", type=Path, default=FASHION_MNIST, help="IDX files (default: %(default)s)")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = 1, min(options.seconds, 6.0)
    return options


def main() -> None:
    options = parse_options()
    if options.png is not None:
        pictures.require_matplotlib()  # before minutes of measuring
    try:
        Data.load(options.data, "test")
    except IdxError as error:
        sys.exit(f"--data {error}\nDebian and Ubuntu: apt install dataset-fashion-mnist")
    record = Record.begin("straggler", QUESTION, options)
    record.caveat("Computing time is emulated; Adam's rate and beta1 were tuned for each kind, see the README.")
    runs: list[Run] = []
    with EmbeddedServer.start() as server, Workers(options.data, server.addresses[0]) as workers:
        rows = [(name, settings) for name in options.candidates for settings in settings_of(name, options)]
        for repetition in range(options.rounds):
            for name, (learning_rate, beta1) in order_of(rows, options.seed + repetition):
                plan = Plan(
                    candidate=name,
                    learning_rate=learning_rate,
                    beta1=beta1,
                    seed=options.seed + repetition,
                    duration_s=options.seconds,
                    straggler=options.straggler,
                    step_s=options.step_ms / 1000,
                    slowdown=options.slowdown,
                )
                run = workers.run(plan)
                runs.append(run)
                print(
                    f"repetition {repetition + 1}  {name} ({learning_rate:g}, {beta1:g}): {run.samples_per_s:.0f}"
                    f" samples/s, {options.target:.0%} after {run.seconds_to(options.target):.1f} s, at the end"
                    f" {run.final_accuracy():.1%}, steps {run.steps}",
                    flush=True,
                )
    runs.sort(key=lambda run: rows.index((run.candidate, (run.learning_rate, run.beta1))))
    record.tables.append(table_of(runs, options.target))
    record.values = {"runs": [asdict(run) for run in runs], "target": options.target}
    record.finish(draw=lambda path: plot(runs, options.target, path))


if __name__ == "__main__":
    main()
