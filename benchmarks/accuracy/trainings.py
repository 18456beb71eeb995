"""One training, of one candidate with one seed: by ranks of a process group, or by workers that push in turn."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accuracy.tasks import task_of
from harness.ranks import Rank
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import psengine
from psengine.protocol.frames import payload_tensor
from psengine.strategies.registry import resolve_strategy

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.shard_world import SGD, World, spec, team


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
    """What came of a plan: loss in nats, percent of wrong answers, and the mean staleness of the updates."""

    plan: Plan
    loss: float
    wrong: float
    staleness: float = 0.0


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


def train_in_turns(plan: Plan) -> Run:
    """Workers that push to a real shard one after the other, in an order that the seed gives; no sockets, one thread.

    A step takes a worker between half and one and a half of a simulated second, drawn each time. Then its gradient, of
    the weights that it got before, is pushed; the answer is its next weights.
    """
    task = task_of(plan.task)
    torch.manual_seed(plan.seed)
    network = task.model()
    flat = parameters_to_vector(network.parameters()).detach()
    rule = resolve_strategy(plan.strategy).rule  # what the strategy asks of servers
    workers = team(World(), plan.workers, [spec(0, flat.numel())], values={0: flat}, rule=rule)
    settings = SGD | {"lr": plan.learning_rate, "momentum": plan.momentum}
    workers[0].configure(0, flat.numel(), groups=[settings])
    held = [(0, flat)] * plan.workers  # version, weights
    pushed = [0] * plan.workers
    batches = [torch.Generator().manual_seed(1000 * plan.seed + number) for number in range(plan.workers)]
    durations = torch.Generator().manual_seed(plan.seed)
    ready = [(_step_s(durations), number) for number in range(plan.workers)]
    heapq.heapify(ready)
    total_staleness, updates = 0, plan.workers * plan.steps
    for update in range(updates):
        now_s, number = ready[0]
        base_version, weights = held[number]
        vector_to_parameters(weights, network.parameters())
        gradients = torch.autograd.grad(task.loss(network, plan.batch_size, batches[number]), [*network.parameters()])
        gradient = torch.cat([one.reshape(-1) for one in gradients])
        pushed[number] += 1
        groups = [settings | {"lr": plan.rate_after(update / updates)}]
        pushes = workers[number].push(0, pushed[number], gradient, version=base_version, body={"groups": groups})
        (answer,) = pushes
        workers[number].take()
        # A gradient that is not finite is refused, and makes no version.
        total_staleness += max(0, answer.version - 1 - base_version)
        held[number] = (answer.version, payload_tensor(answer))
        heapq.heapreplace(ready, (now_s + _step_s(durations), number))
    vector_to_parameters(held[number][1], network.parameters())
    return _judged(plan, network, staleness=total_staleness / updates)


def _step_s(durations: torch.Generator) -> float:
    return 0.5 + torch.rand((), generator=durations).item()


def _judged(plan: Plan, network: nn.Module, **more: Any) -> Run:
    """With one line of progress where this process speaks."""
    loss, wrong = task_of(plan.task).judge(network)
    psengine.print(f"{plan.task} {plan.candidate}, seed {plan.seed}: loss {loss:.4f}, {wrong:.2f} % wrong", flush=True)
    return Run(plan=plan, loss=loss, wrong=wrong, **more)
