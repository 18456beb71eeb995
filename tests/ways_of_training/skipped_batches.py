"""A batch is skipped: an exception is caught, somewhere in a step, and training goes on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from ways_of_training.networks import classify, mlp
from ways_of_training.run import Run
from ways_of_training.table import row


class BadBatchError(Exception):
    """What the loops here skip."""


def refuse(*_: Any) -> None:
    raise BadBatchError


def train(
    run: Run, model: Any, optimizer: torch.optim.Optimizer, step_of: Callable[[int, Tensor, Tensor], None]
) -> None:
    """Five steps, of which those that raise are skipped."""
    for step, (x, y) in enumerate(run.batches(5)):
        try:
            optimizer.zero_grad()
            step_of(step, x, y)
        except BadBatchError:
            optimizer.zero_grad()
            continue
        optimizer.step()
        run.note(classify(model.module, x, y))


class Picky(nn.Module):
    """Raises between two layers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(8, outputs=8), mlp(8, inputs=8)
        self.is_bad = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.is_bad:
            raise BadBatchError
        return self.second(hidden)


@row
def forward_raises(run: Run) -> None:
    """Forward raises on two batches."""
    model = run.wrap(Picky())
    optimizer = run.sgd(model)

    def step_of(step: int, x: Tensor, y: Tensor) -> None:
        model.module.is_bad = step in (1, 3)
        classify(model, x, y).backward()

    train(run, model, optimizer, step_of)


@row
def forward_raises_first(run: Run) -> None:
    """Forward raises on the very first batch."""
    model = run.wrap(Picky())
    optimizer = run.sgd(model)

    def step_of(step: int, x: Tensor, y: Tensor) -> None:
        model.module.is_bad = step == 0
        classify(model, x, y).backward()

    train(run, model, optimizer, step_of)


@row
def second_forward_raises(run: Run) -> None:
    """The second of two forwards raises, and the loss is the first one's alone."""
    model = run.wrap(Picky())
    optimizer = run.sgd(model)

    def step_of(step: int, x: Tensor, y: Tensor) -> None:
        model.module.is_bad = False
        loss = classify(model, x, y)
        model.module.is_bad = step == 1
        try:
            loss = loss + classify(model, x.flip(0), y.flip(0))
        except BadBatchError:
            model.module.is_bad = False
        loss.backward()

    train(run, model, optimizer, step_of)


@row
def input_raises(run: Run) -> None:
    """A batch of the wrong width raises in the first layer."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)

    def step_of(step: int, x: Tensor, y: Tensor) -> None:
        try:
            output = model(x[:, :-1] if step == 2 else x)
        except RuntimeError:
            raise BadBatchError from None
        F.cross_entropy(output, y).backward()

    train(run, model, optimizer, step_of)


@row
def loss_raises(run: Run) -> None:
    """The loss raises, after a forward that was complete."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)

    def step_of(step: int, x: Tensor, y: Tensor) -> None:
        output = model(x)
        if step == 1:
            raise BadBatchError
        F.cross_entropy(output, y).backward()

    train(run, model, optimizer, step_of)


@row
def loss_raises_among_unused_parameters(run: Run) -> None:
    """The loss raises after a forward whose unused parameters were searched."""
    model = run.wrap(mlp(), find_unused_parameters=True)
    optimizer = run.sgd(model)

    def step_of(step: int, x: Tensor, y: Tensor) -> None:
        output = model(x)
        if step in (0, 2):
            raise BadBatchError
        F.cross_entropy(output, y).backward()

    train(run, model, optimizer, step_of)


@row
def backward_raises_before_any_gradient(run: Run) -> None:
    """A hook of the output raises in backward, before any gradient is there."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)

    def step_of(step: int, x: Tensor, y: Tensor) -> None:
        output = model(x)
        if step == 1:
            output.register_hook(refuse)
        F.cross_entropy(output, y).backward()

    train(run, model, optimizer, step_of)


@row
def loss_is_nan(run: Run) -> None:
    """A loss that is NaN is left out before backward, on both ranks."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)

    def step_of(step: int, x: Tensor, y: Tensor) -> None:
        loss = classify(model, x * (math.nan if step == 1 else 1), y)
        if not loss.isfinite():
            raise BadBatchError
        loss.backward()

    train(run, model, optimizer, step_of)


@row
def gradients_are_nan(run: Run) -> None:
    """Gradients that are NaN are left out before the optimizer's step."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)

    def step_of(step: int, x: Tensor, y: Tensor) -> None:
        classify(model, x * (math.nan if step == 2 and run.rank == 0 else 1), y).backward()
        if not all(parameter.grad.isfinite().all() for parameter in model.parameters()):
            raise BadBatchError

    train(run, model, optimizer, step_of)


@row
def step_hook_raises(run: Run) -> None:
    """A hook before optimizer.step raises, once; the step is left out."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    steps = iter(range(5))

    def sometimes(*_: Any) -> None:
        if next(steps) == 2:
            raise BadBatchError

    optimizer.register_step_pre_hook(sometimes)
    for x, y in run.batches(5):
        optimizer.zero_grad()
        classify(model, x, y).backward()
        try:
            optimizer.step()
        except BadBatchError:
            continue


@row
def closure_raises(run: Run) -> None:
    """The closure of optimizer.step raises, once."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    for step, (x, y) in enumerate(run.batches(5)):

        def closure(step: int = step, x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            if step == 2:
                raise BadBatchError
            loss = classify(model, x, y)
            loss.backward()
            return loss

        try:
            run.note(optimizer.step(closure))
        except BadBatchError:
            run.note(-1.0)


@row
def step_is_interrupted_after_backward(run: Run) -> None:
    """An exception between backward and the step: the gradients are dropped."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)

    def step_of(step: int, x: Tensor, y: Tensor) -> None:
        classify(model, x, y).backward()
        if step == 1:
            raise BadBatchError

    train(run, model, optimizer, step_of)


@row
def raises_inside_no_sync(run: Run) -> None:
    """A micro-batch raises in forward inside no_sync; the other micro-batch counts alone."""
    model = run.wrap(Picky())
    optimizer = run.sgd(model)

    def step_of(step: int, x: Tensor, y: Tensor) -> None:
        model.module.is_bad = step == 2
        try:
            with model.no_sync():
                classify(model, x[:2], y[:2]).backward()
        except BadBatchError:
            model.module.is_bad = False
        classify(model, x[2:], y[2:]).backward()

    train(run, model, optimizer, step_of)


@row
def evaluation_raises(run: Run) -> None:
    """An evaluation between two steps raises, under no_grad."""
    model = run.wrap(Picky())
    optimizer = run.sgd(model)

    def step_of(step: int, x: Tensor, y: Tensor) -> None:
        model.module.is_bad = step == 1
        try:
            with torch.no_grad():
                run.note(classify(model, x, y))
        except BadBatchError:
            model.module.is_bad = False
        classify(model, x, y).backward()

    train(run, model, optimizer, step_of)
