"""One training, of one candidate with one seed, by the ranks of a process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accuracy.tasks import task_of
from harness.ranks import Rank
from torch import nn

import psengine


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run.

    Attributes:
        candidate: its name in the study.
        strategy: as ``strategy=`` takes it.
        batch_size: of each worker.
        samples: of all workers together.
        optimizer: "SGD", with ``momentum``, or "AdamW".
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

    @property
    def steps(self) -> int:
        """Of each worker."""
        return self.samples // (self.workers * self.batch_size)

    def rate_after(self, fraction: float) -> float:
        """Learning rate after a fraction of the run: constant in the first half, then falling linearly to zero."""
        return self.learning_rate * min(1.0, 2 * (1 - fraction))


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of a plan: loss in nats, and percent of wrong answers."""

    plan: Plan
    loss: float
    wrong: float


def train_in_ranks(rank: Rank, plans: Sequence[Plan]) -> list[Run]:
    """Each rank of a process group is a worker; returns rank 0's runs."""
    runs = []
    for plan in plans:
        task = task_of(plan.task)
        torch.manual_seed(plan.seed)
        network = task.model()
        model = psengine.DistributedDataParallel(network, strategy=plan.strategy)
        optimizer = psengine.DistributedOptimizer(_optimizer(plan, network), model)
        generator = torch.Generator().manual_seed(1000 * plan.seed + rank.rank)
        for step in range(plan.steps):
            for group in optimizer.param_groups:
                group["lr"] = plan.rate_after(step / plan.steps)
            optimizer.zero_grad()
            task.loss(model, plan.batch_size, generator).backward()
            optimizer.step()
        model.leave()
        runs.append(_judged(plan, network))
    return runs


def _optimizer(plan: Plan, network: nn.Module) -> torch.optim.Optimizer:
    if plan.optimizer == "AdamW":
        return torch.optim.AdamW(network.parameters(), lr=plan.learning_rate, weight_decay=0.01)
    return torch.optim.SGD(network.parameters(), lr=plan.learning_rate, momentum=plan.momentum)


def _judged(plan: Plan, network: nn.Module) -> Run:
    """With one line of progress where this process speaks."""
    loss, wrong = task_of(plan.task).judge(network)
    psengine.print(f"{plan.task} {plan.candidate}, seed {plan.seed}: loss {loss:.4f}, {wrong:.2f} % wrong", flush=True)
    return Run(plan=plan, loss=loss, wrong=wrong)
