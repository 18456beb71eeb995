"""The training of run.py under a counted clock: one process, no server, no exchange, no waiting.

python benchmarks/straggler/virtual_time.py [--straggler none] [--candidates sync,async] [--repetitions N] [--json FILE]

A step takes exactly as long as the plan says, and an exchange takes no time: the load of the machine changes nothing,
and every run can be repeated to the bit. Which gradient meets which weights, the optimizer and the rules of the servers
are as in run.py. It answers which rule, rate and momentum learn best; run.py answers what a strategy costs in time.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.command_line import some_of
from straggler.run import (
    BATCH_SIZE,
    CANDIDATES,
    FASHION_MNIST,
    REFERENCE,
    SNAPSHOT_S,
    WORLD_SIZE,
    Data,
    Plan,
    Run,
    build,
    compute_s,
    curve_of,
    settings_of,
    table_of,
)
from torch.nn import functional as F

from psengine.parameter_server.server.rules.step import compensate

SIMULATED = (REFERENCE, *(name for name in CANDIDATES if name.startswith("async")))
Weights = list[torch.Tensor]


class Training:
    """The weights that are trained, their optimizer, and the batches of each worker."""

    def __init__(self, plan: Plan, data: Data) -> None:
        torch.manual_seed(plan.seed)
        self.weights = list(build().parameters())
        self.optimizer = torch.optim.Adam(self.weights, lr=plan.learning_rate, betas=(plan.beta1, 0.999))
        self.steps = [0] * WORLD_SIZE
        self._own_data = [
            Data(data.images[rank::WORLD_SIZE], data.labels[rank::WORLD_SIZE]) for rank in range(WORLD_SIZE)
        ]
        self._generators = [torch.Generator().manual_seed(1000 * plan.seed + rank) for rank in range(WORLD_SIZE)]

    def copy(self) -> Weights:
        return [weight.detach().clone().requires_grad_() for weight in self.weights]

    def gradients(self, rank: int, weights: Weights) -> Weights:
        """Of this worker's next batch."""
        self.steps[rank] += 1
        own = self._own_data[rank]
        picked = torch.randint(len(own.labels), (BATCH_SIZE,), generator=self._generators[rank])
        first, first_bias, second, second_bias = weights
        hidden = F.relu(F.linear(own.images[picked], first, first_bias))
        loss = F.cross_entropy(F.linear(hidden, second, second_bias), own.labels[picked])
        return list(torch.autograd.grad(loss, weights))

    def step(self, gradients: Weights, learning_rate: float) -> None:
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient
        self.optimizer.param_groups[0]["lr"] = learning_rate
        self.optimizer.step()


def train_together(plan: Plan, training: Training) -> Iterator[tuple[float, int]]:
    """Every step has the mean gradient of all workers; yields (when it ended, staleness)."""
    now_s = 0.0
    for step in range(10**9):
        now_s += max(compute_s(plan, rank, step) for rank in range(WORLD_SIZE))
        columns = zip(*(training.gradients(rank, training.weights) for rank in range(WORLD_SIZE)), strict=True)
        training.step([sum(column) / WORLD_SIZE for column in columns], plan.learning_rate)
        yield now_s, 0


def train_apart(plan: Plan, training: Training) -> Iterator[tuple[float, int]]:
    """Every gradient is a step when its worker is ready; yields (when it was applied, staleness)."""
    name, _, value = plan.candidate.partition(":")[2].partition("=")
    max_staleness = int(value) if name == "max_staleness" else None
    held: dict[int, None] = {}
    version = 0
    copies = [(version, training.copy()) for _ in range(WORLD_SIZE)]
    ready = [(compute_s(plan, rank, 0), rank) for rank in range(WORLD_SIZE)]
    heapq.heapify(ready)
    while True:
        now_s, rank = heapq.heappop(ready)
        base_version, weights = copies[rank]
        gradients = training.gradients(rank, weights)
        staleness = version - base_version
        if name == "delay_compensation":
            pairs = zip(gradients, training.weights, weights, strict=True)
            with torch.no_grad():
                gradients = [compensate(gradient, now, then, float(value)) for gradient, now, then in pairs]
        training.step(gradients, plan.learning_rate / (staleness + 1 if name == "staleness_scaling" else 1))
        version += 1
        yield now_s, staleness
        held[rank] = None
        for waiting in list(held):
            if max_staleness is None or training.steps[waiting] - min(training.steps) <= max_staleness:
                del held[waiting]
                copies[waiting] = (version, training.copy())
                heapq.heappush(ready, (now_s + compute_s(plan, waiting, training.steps[waiting]), waiting))


def simulate(plan: Plan, train_data: Data, test_data: Data) -> Run:
    training = Training(plan, train_data)
    updates = (train_together if plan.candidate == REFERENCE else train_apart)(plan, training)
    staleness: Counter[int] = Counter()
    snapshots: list[tuple[float, Weights]] = []
    for now_s, stale in updates:
        if now_s > plan.duration_s:
            break
        staleness[stale] += 1
        if now_s >= SNAPSHOT_S * (len(snapshots) + 1):
            snapshots.append((now_s, training.copy()))
    is_apart = plan.candidate != REFERENCE
    return Run(
        candidate=plan.candidate,
        learning_rate=plan.learning_rate,
        beta1=plan.beta1,
        samples_per_s=sum(training.steps) * BATCH_SIZE / plan.duration_s,
        steps=training.steps,
        curve=curve_of(snapshots, test_data),
        dropped=0.0,
        staleness=sum(age * count for age, count in staleness.items()) / staleness.total() if is_apart else None,
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--candidates", type=some_of(list(CANDIDATES)), default=SIMULATED, help=f"default: {','.join(SIMULATED)}")
    add("--repetitions", type=int, default=3, help="runs of each candidate, each with its seed (default: %(default)s)")
    add("--seconds", type=float, default=30.0, help="counted seconds of a run (default: %(default)s)")
    add("--straggler", choices=("one", "none"), default="one", help="the last worker is slow, or none is")
    add("--step-ms", type=float, default=40.0, help="computing time of a step (default: %(default)s)")
    add("--slowdown", type=float, default=4.0, help="how many times slower the slow worker is (default: %(default)s)")
    add("--target", type=float, default=0.85, help="test accuracy to be reached (default: %(default)s)")
    add("--learning-rate", type=float, help="one for all, for sweeps (default: those in run.CANDIDATES)")
    add("--beta1", type=float, help="one for all, likewise")
    add("--data", type=Path, default=FASHION_MNIST, help="IDX files (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="also write all runs there")
    options = parser.parse_args()
    if unknown := set(options.candidates) - set(SIMULATED):
        parser.error(f"--candidates: run.py alone has {', '.join(unknown)} (expected some of {', '.join(SIMULATED)})")
    return options


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    train_data, test_data = Data.load(options.data, "train"), Data.load(options.data, "test")
    runs = []
    for name in options.candidates:
        for learning_rate, beta1 in settings_of(name, options):
            for seed in range(options.repetitions):
                plan = Plan(
                    candidate=name,
                    learning_rate=learning_rate,
                    beta1=beta1,
                    seed=seed,
                    duration_s=options.seconds,
                    straggler=options.straggler,
                    step_s=options.step_ms / 1000,
                    slowdown=options.slowdown,
                )
                runs.append(simulate(plan, train_data, test_data))
    table_of(runs, options.target).show()
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(run) for run in runs]))


if __name__ == "__main__":
    main()
