"""What a slow worker costs the others: four workers, one of them four times slower, under each strategy in turn.

python benchmarks/straggler/run.py [--quick] [--candidates sync,async] [--straggler turns] [--json FILE]
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import psengine
from psengine.parameter_server.client.embedded import EmbeddedServer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accuracy.tasks import task_of
from harness.command_line import parser_of, some_of
from harness.data import fashion_mnist
from harness.ranks import Rank, run_ranks
from harness.record import Record
from harness.tables import Table
from harness.turns import order_of

QUESTION = "What does one slow worker cost the others?"
WORLD_SIZE = 4
BATCH_SIZE = 128  # of each worker
WARM_UP_STEPS = 5
STEP_S, SLOWDOWN = 0.04, 4  # computing time of a step, and how many times longer a slow one takes
TARGET = 0.85  # test accuracy
SNAPSHOT_S = 0.5
SMOOTHED = 5  # snapshots
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
    """

    candidate: str
    learning_rate: float
    beta1: float
    seed: int
    duration_s: float
    straggler: str

    def compute_s(self, rank: int, step: int) -> float:
        """How long this step's computing is to take."""
        slow_rank = {"one": WORLD_SIZE - 1, "turns": step % WORLD_SIZE, "none": None}[self.straggler]
        return STEP_S * (SLOWDOWN if rank == slow_rank else 1)


@dataclass(kw_only=True)
class Run:
    """What came of a plan.

    Attributes:
        samples_per_s: of all workers.
        steps: of each worker, in rank order.
        curve: [seconds, test accuracy] of rank 0's weights.
        staleness: how many updates old the weights of an applied gradient were, on average; None where there is none.
    """

    plan: Plan
    samples_per_s: float
    steps: list[int]
    curve: list[tuple[float, float]]
    staleness: float | None

    def seconds_to_target(self) -> float:
        """When the median of ``SMOOTHED`` successive accuracies first reached the target; infinite if it did not.

        The first single one would flatter a curve that swings.
        """
        windows = zip(*(self.curve[start:] for start in range(SMOOTHED)), strict=False)
        reached = (w[-1][0] for w in windows if statistics.median(value for _, value in w) >= TARGET)
        return next(reached, float("inf"))

    def final_accuracy(self) -> float:
        """Mean over the last tenth of the run, at least ``SMOOTHED`` snapshots."""
        return statistics.mean(value for _, value in self.curve[-max(SMOOTHED, len(self.curve) // 10) :])


# ---- on a worker ---------------------------------------------------------------------------------------------------


def train_all(rank: Rank, plans: Sequence[Plan]) -> list[Run]:
    """Carry out one plan after the other; rank 0 returns the runs."""
    runs = []
    for number, plan in enumerate(plans):
        # The servers keep the jobs of earlier runs, which have other rules.
        os.environ["PSENGINE_JOB"] = f"straggler-{number}"
        runs.append(train(plan, rank.rank))
        psengine.print(f"{plan.candidate}: {runs[-1].samples_per_s:.0f} samples/s, steps {runs[-1].steps}", flush=True)
    return runs


def train(plan: Plan, rank: int) -> Run:
    """Of the images' task: under 2 ms of computing, so that two cores are enough for four workers."""
    torch.manual_seed(plan.seed)
    network = task_of("images").model()
    optimizer: Any = torch.optim.Adam(network.parameters(), lr=plan.learning_rate, betas=(plan.beta1, 0.999))
    if plan.candidate == "native":
        model: nn.Module = nn.parallel.DistributedDataParallel(network)
    else:
        model = psengine.DistributedDataParallel(network, strategy=plan.candidate)
        optimizer = psengine.DistributedOptimizer(optimizer, model)
    generator = torch.Generator().manual_seed(1000 * plan.seed + rank)
    for step in range(WARM_UP_STEPS):
        take_step(plan, rank, step, model, optimizer, generator)
    dist.barrier()
    started_s = next_snapshot_s = time.monotonic()
    steps, snapshots = 0, []
    for step in itertools.count(WARM_UP_STEPS):
        take_step(plan, rank, step, model, optimizer, generator)
        now_s = time.monotonic()
        is_over = now_s - started_s >= plan.duration_s
        steps += not is_over
        if rank == 0 and not is_over and now_s >= next_snapshot_s:
            next_snapshot_s += SNAPSHOT_S
            snapshots.append((now_s - started_s, parameters_to_vector(network.parameters()).detach()))
        if plan.candidate in IN_A_GROUP:
            # All take the same number of steps. A number goes round in a thousandth of a step's time.
            flag = torch.tensor(float(is_over))
            dist.broadcast(flag, 0)
            is_over = bool(flag)
        if is_over:
            break
    staleness = None
    if plan.candidate not in IN_A_GROUP:
        counts = model.statistics().staleness
        if counts:
            staleness = sum(age * count for age, count in counts.items()) / max(1, sum(counts.values()))
    if plan.candidate != "native":
        model.leave()
    all_steps = list(psengine.gather(steps))
    return Run(
        plan=plan,
        samples_per_s=sum(all_steps) * BATCH_SIZE / plan.duration_s,
        steps=all_steps,
        curve=curve_of(snapshots),
        staleness=staleness,
    )


def take_step(
    plan: Plan,
    rank: int,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> None:
    """A step whose forward takes as long as the plan says. The backward is real, because it exchanges gradients."""
    ready_s = time.monotonic() + plan.compute_s(rank, step)
    optimizer.zero_grad()
    loss = task_of("images").loss(model, BATCH_SIZE, generator)
    time.sleep(max(0.0, ready_s - time.monotonic()))
    loss.backward()
    optimizer.step()


@torch.no_grad()
def curve_of(snapshots: list[tuple[float, torch.Tensor]]) -> list[tuple[float, float]]:
    """Seconds and test accuracy of each snapshot."""
    model, curve = task_of("images").model(), []
    for second, weights in snapshots:
        vector_to_parameters(weights, model.parameters())
        _, wrong = task_of("images").judge(model)
        curve.append((second, 1 - wrong / 100))
    return curve


# ---- here ----------------------------------------------------------------------------------------------------------


def table_of(runs: Sequence[Run]) -> Table:
    """Medians over each candidate's runs."""
    columns = ["candidate", "rate, beta1", "samples/s (lowest-highest)", f"of {REFERENCE}", f"seconds to {TARGET:.0%}"]
    columns += ["accuracy at the end (lowest-highest)", "steps of each worker", "notes"]
    rows = []
    reference_rates = [run.samples_per_s for run in runs if run.plan.candidate == REFERENCE]
    found: dict[tuple[str, float, float], list[Run]] = {}
    for run in runs:
        found.setdefault((run.plan.candidate, run.plan.learning_rate, run.plan.beta1), []).append(run)
    for (name, learning_rate, beta1), own in found.items():
        rates = [run.samples_per_s for run in own]
        ratio = "-"
        if reference_rates and name != REFERENCE:
            ratio = f"{statistics.median(rates) / statistics.median(reference_rates):.2f}"
        seconds = statistics.median(run.seconds_to_target() for run in own)
        accuracies = [run.final_accuracy() for run in own]
        notes = []
        if own[0].staleness is not None:
            notes.append(f"staleness {statistics.mean(run.staleness or 0 for run in own):.1f}")
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


def main() -> None:
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
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = 1, min(options.seconds, 6.0)
    fashion_mnist("t10k")
    record = Record.begin("straggler", QUESTION, options)
    record.caveat("Computing time is emulated; Adam's rate and beta1 were tuned for each kind, see the README.")
    rows = [(name, settings) for name in options.candidates for settings in CANDIDATES[name]]
    plans = [
        Plan(
            candidate=name,
            learning_rate=learning_rate,
            beta1=beta1,
            seed=seed,
            duration_s=options.seconds,
            straggler=options.straggler,
        )
        for seed in range(options.rounds)
        for name, (learning_rate, beta1) in order_of(rows, seed)
    ]
    deadline_s = START_S + len(plans) * (options.seconds + 10)
    with EmbeddedServer.start() as server:
        environment = {"PSENGINE_SERVERS": server.addresses[0]}
        runs = run_ranks(train_all, WORLD_SIZE, plans, deadline_s=deadline_s, environment=environment)[0]
    record.tables.append(table_of(runs))
    record.values = {"runs": [asdict(run) for run in runs]}
    record.finish()


if __name__ == "__main__":
    from straggler import run  # ranks unpickle this module's classes by name

    run.main()
