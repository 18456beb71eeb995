"""What happens between two steps: evaluation, metrics, decisions that ranks share."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from ways_of_training.networks import classify, mlp, train
from ways_of_training.run import CLASSES, WIDTH, Run
from ways_of_training.table import row

import psengine


def train_with(run: Run, between: Any, steps: int = 3) -> None:
    """``between(model, x, y)`` runs after each step."""
    model = run.wrap(nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, CLASSES)))
    optimizer = run.sgd(model)
    for x, y in run.batches(steps):
        optimizer.zero_grad()
        classify(model, x, y).backward()
        optimizer.step()
        between(model, x, y)


def evaluate(run: Run, context: Any, *, inner: bool = False, mode: bool = True) -> None:
    def between(model: Any, x: Tensor, y: Tensor) -> None:
        model.train(not mode)
        with context():
            run.note(classify(model.module if inner else model, x, y))
        model.train()

    train_with(run, between)


@row
def evaluated_with_gradients(run: Run) -> None:
    """A forward with gradients whose loss nobody differentiates."""
    evaluate(run, contextlib.nullcontext)


@row
def first_used_for_evaluation(run: Run) -> None:
    """The wrapped model's very first forwards are evaluations."""
    model = run.wrap(mlp())
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            for x, y in run.batches(2):
                run.note(classify(model, x, y))
    train(run, model)


@row
def metrics_averaged(run: Run) -> None:
    """psengine.mean, sum and gather of numbers, tensors and dicts."""

    def between(model: Any, x: Tensor, y: Tensor) -> None:
        right = (model(x).argmax(1) == y).float().sum()
        run.note(psengine.mean({"share": right / len(y)})["share"])
        run.note(psengine.sum(right))
        for part in psengine.gather(torch.tensor([float(run.rank), right])):
            run.note(part)

    train_with(run, between)


@row
def stopped_early(run: Run) -> None:
    """Rank 1 wants to stop after the third of six steps; everybody does."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    for step, (x, y) in enumerate(run.batches(6)):
        optimizer.zero_grad()
        classify(model, x, y).backward()
        optimizer.step()
        stop = torch.tensor(int(step == 2 and run.rank == run.world_size - 1))
        dist.all_reduce(stop)
        if stop:
            break
    run.note(step)
