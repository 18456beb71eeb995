"""Learning rates that change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import lr_scheduler
from ways_of_training.networks import classify, mlp
from ways_of_training.run import Run
from ways_of_training.table import row, within


def train(run: Run, schedule_of: Callable[[torch.optim.Optimizer], Any], steps: int = 5, **options: float) -> None:
    model = run.wrap(mlp())
    optimizer = run.sgd(model, **options)
    schedule = schedule_of(optimizer)
    for x, y in run.batches(steps):
        optimizer.zero_grad()
        classify(model, x, y).backward()
        optimizer.step()
        schedule.step()
        run.note(float(optimizer.param_groups[0]["lr"]))


@row
def rate_in_a_tensor(run: Run) -> None:
    """A learning rate that is a tensor, with foreach=False."""
    train(run, lambda o: lr_scheduler.StepLR(o, 2), lr=torch.tensor(0.1), foreach=False)  # type: ignore[arg-type]


@row(one_worker=within(1e-6, "servers get the rate as a number, and compute with it in float64"))
def rate_in_a_tensor_under_adamw(run: Run) -> None:
    """AdamW with a learning rate that is a tensor."""
    model = run.wrap(mlp())
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False), model)
    for x, y in run.training(optimizer, 4):
        classify(model, x, y).backward()


@row
def reduced_on_a_plateau(run: Run) -> None:
    """ReduceLROnPlateau on a loss that is averaged over ranks."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=1.0)
    for x, y in run.batches(4):
        optimizer.zero_grad()
        loss = classify(model, x, y)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        schedule.step(mean / run.world_size)
        run.note(optimizer.param_groups[0]["lr"])


@row
def rates_set_by_hand(run: Run) -> None:
    """param_groups are written to: rate, decay and momentum."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    for step, (x, y) in enumerate(run.batches(4)):
        for group in optimizer.param_groups:
            group.update(lr=0.1 / (step + 1), weight_decay=0.01 * step, momentum=0.9 - 0.1 * step)
        optimizer.zero_grad()
        classify(model, x, y).backward()
        optimizer.step()


@row
def schedule_stepped_before_the_optimizer(run: Run) -> None:
    """The schedule is stepped between backward and optimizer.step."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    schedule = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for x, y in run.training(optimizer):
        classify(model, x, y).backward()
        schedule.step()
