"""Learning rates that change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler
from ways_of_training.networks import classify, mlp
from ways_of_training.run import Run
from ways_of_training.table import row


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
