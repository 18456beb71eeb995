"""One training, of one candidate with one seed: by ranks of a process group, or by workers that push in turn."""

from __future__ import annotations

import heapq
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accuracy.tasks import Task, task_of
from harness.ranks import Rank
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import psengine
from psengine.protocol.frames import payload_tensor
from psengine.strategies.registry import resolve_strategy

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.shard_world import SGD, World, spec, team

Curve = list[tuple[int, float, float]]  # samples of all workers, loss, percent of wrong answers
POINTS = 12


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run.

    Attributes:
        candidate: its name in the study.
        strategy: as ``strategy=`` takes it.
        batch_size: of each worker.
        samples: of all workers together.
        optimizer: "SGD", with ``momentum``, or "AdamW".
        round_steps: steps between two points at which replicas are equal.
    """

    task: str
    candidate: str
    strategy: str
    workers: int
    batch_size: int
    samples: int
    optimizer: str
    learning_rate: float
    momentum: float
    seed: int
    round_steps: int = 1

    @property
    def steps(self) -> int:
        """Of each worker."""
        return self.samples // (self.workers * self.batch_size)

    def rate_after(self, fraction: float) -> float:
        """Learning rate after a fraction of the run: constant in the first half, then falling linearly to zero."""
        return self.learning_rate * min(1.0, 2 * (1 - fraction))

    def judged_steps(self) -> set[int]:
        """After which steps of a worker the model is judged: more often at the beginning, at ends of rounds."""
        rounds = self.steps // self.round_steps
        return {self.round_steps * max(1, round(rounds * 2 ** (-k / 1.5))) for k in range(POINTS)}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of a plan.

    Attributes:
        seconds: the run took here.
        staleness: of the updates, mean; None where there is none.
    """

    plan: Plan
    curve: Curve
    seconds: float
    staleness: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Run:
        return cls(**(fields | {"plan": Plan(**fields["plan"])}))


class Worker:
    """A wrapped model with its optimizer, and where its batches come from."""

    def __init__(self, plan: Plan, worker: int) -> None:
        self._plan, self._task = plan, task_of(plan.task)
        torch.manual_seed(plan.seed)
        network = self._task.model()
        self.model = psengine.DistributedDataParallel(network, strategy=plan.strategy)
        self.optimizer = psengine.DistributedOptimizer(_optimizer(plan, network), self.model)
        self._generator = torch.Generator().manual_seed(1000 * plan.seed + worker)
        self.steps = 0

    def step(self) -> None:
        """Forward, backward, and the optimizer's step with what its strategy exchanges."""
        plan = self._plan
        for group in self.optimizer.param_groups:
            group["lr"] = plan.rate_after(self.steps / plan.steps)
        self.optimizer.zero_grad()
        self._task.loss(self.model, plan.batch_size, self._generator).backward()
        self.optimizer.step()
        self.steps += 1


def _optimizer(plan: Plan, network: nn.Module) -> torch.optim.Optimizer:
    if plan.optimizer == "AdamW":
        return torch.optim.AdamW(network.parameters(), lr=plan.learning_rate, weight_decay=0.01)
    return torch.optim.SGD(network.parameters(), lr=plan.learning_rate, momentum=plan.momentum)


def train_in_ranks(rank: Rank, plans: Sequence[dict[str, Any]], job: str) -> list[dict[str, Any]]:
    """Each rank of a process group is a worker; returns rank 0's runs."""
    runs = []
    for number, fields in enumerate(plans):
        plan = Plan(**fields)
        os.environ["PSENGINE_JOB"] = f"{job}-{number}"
        begin_s, curve = time.monotonic(), []
        worker, judged_steps = Worker(plan, rank.rank), plan.judged_steps()
        while worker.steps < plan.steps:
            worker.step()
            if rank.rank == 0 and worker.steps in judged_steps:
                curve.append(_point(plan, task_of(plan.task), worker.model.module, worker.steps))
        worker.model.leave()
        runs.append(Run(plan=plan, curve=curve, seconds=time.monotonic() - begin_s))
        if rank.rank == 0:
            tell(runs[-1])
    return [run.to_json() for run in runs] if rank.rank == 0 else []


def train_in_turns(plan: Plan) -> Run:
    """Workers that push to a real shard one after the other, in an order that the seed gives; no sockets, one thread.

    A step takes a worker between half and one and a half of a simulated second, drawn each time. Then its gradient, of
    the weights that it got before, is pushed; the answer is its next weights.
    """
    begin_s, task, curve = time.monotonic(), task_of(plan.task), []
    torch.manual_seed(plan.seed)
    network = task.model()
    flat = parameters_to_vector(network.parameters()).detach()
    layout = [spec(0, flat.numel())]
    workers = team(World(codec=False), plan.workers, layout, values={0: flat}, rule=_rule(plan))
    settings = SGD | {"lr": plan.learning_rate, "momentum": plan.momentum}
    workers[0].configure(0, flat.numel(), groups=[settings])
    held = [(0, flat)] * plan.workers  # version, weights
    pushed = [0] * plan.workers
    batches = [torch.Generator().manual_seed(1000 * plan.seed + number) for number in range(plan.workers)]
    durations = torch.Generator().manual_seed(plan.seed)
    ready = [(_step_s(durations), number) for number in range(plan.workers)]
    heapq.heapify(ready)
    judged_steps, total_staleness = plan.judged_steps(), 0
    for update in range(plan.workers * plan.steps):
        now_s, number = ready[0]
        base_version, weights = held[number]
        vector_to_parameters(weights, network.parameters())
        gradients = torch.autograd.grad(task.loss(network, plan.batch_size, batches[number]), [*network.parameters()])
        gradient = torch.cat([one.reshape(-1) for one in gradients])
        pushed[number] += 1
        groups = [settings | {"lr": plan.rate_after(update / (plan.workers * plan.steps))}]
        pushes = workers[number].push(0, pushed[number], gradient, version=base_version, body={"groups": groups})
        (answer,) = pushes
        workers[number].take()
        # A gradient that is not finite is refused, and makes no version.
        total_staleness += max(0, answer.version - 1 - base_version)
        held[number] = (answer.version, payload_tensor(answer))
        heapq.heapreplace(ready, (now_s + _step_s(durations), number))
        steps, rest = divmod(update + 1, plan.workers)
        if rest == 0 and steps in judged_steps:
            vector_to_parameters(held[number][1], network.parameters())
            curve.append(_point(plan, task, network, steps))
    staleness = total_staleness / (plan.workers * plan.steps)
    return Run(plan=plan, curve=curve, seconds=time.monotonic() - begin_s, staleness=staleness)


def _rule(plan: Plan) -> Mapping[str, Any]:
    """What the strategy asks of servers."""
    return resolve_strategy(plan.strategy).rule


def _step_s(durations: torch.Generator) -> float:
    return 0.5 + torch.rand((), generator=durations).item()


def _point(plan: Plan, task: Task, network: nn.Module, steps: float) -> tuple[int, float, float]:
    return (round(steps * plan.workers * plan.batch_size), *task.judge(network))


def tell(run: Run) -> None:
    """One line of progress."""
    samples, loss, wrong = run.curve[-1]
    plan = run.plan
    print(
        f"{plan.task} {plan.candidate}, rate {plan.learning_rate:g}, seed {plan.seed}: loss {loss:.4f}, {wrong:.2f} %"
        f" wrong after {samples} samples; {run.seconds:.1f} s",
        flush=True,
    )
