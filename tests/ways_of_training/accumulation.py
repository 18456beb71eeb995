"""Gradients accumulated over micro-batches."""

import contextlib

import torch
from ways_of_training.networks import Pieces, classify, mlp
from ways_of_training.run import Run
from ways_of_training.table import row


@row
def accumulated_inside_no_sync(run: Run) -> None:
    """Three micro-batches, the first two inside no_sync."""
    model = run.wrap(mlp())
    for x, y in run.training(run.sgd(model), size=6):
        for part in range(3):
            with model.no_sync() if part < 2 else contextlib.nullcontext():
                (classify(model, x[part::3], y[part::3]) / 3).backward()


@row
def only_forward_inside_no_sync(run: Run) -> None:
    """The forward inside no_sync, its backward outside."""
    model = run.wrap(mlp())
    for x, y in run.training(run.sgd(model)):
        with model.no_sync():
            loss = classify(model, x[:2], y[:2])
        loss.backward()
        classify(model, x[2:], y[2:]).backward()


@row
def only_backward_inside_no_sync(run: Run) -> None:
    """The forward outside no_sync, its backward inside: it is exchanged."""
    model = run.wrap(mlp())
    for x, y in run.training(run.sgd(model)):
        loss = classify(model, x, y)
        with model.no_sync():
            loss.backward()


@row
def accumulated_with_unused_parameters(run: Run) -> None:
    """A head that only the micro-batch inside no_sync uses, with find_unused_parameters."""
    model = run.wrap(Pieces(), find_unused_parameters=True)
    for x, y in run.training(run.sgd(model), 4):
        with model.no_sync():
            torch.nn.functional.cross_entropy(model(x, with_spare=True), y).backward()
        torch.nn.functional.cross_entropy(model(x), y).backward()


@row
def first_step_accumulates(run: Run) -> None:
    """The very first backward is inside no_sync."""
    model = run.wrap(mlp(8, 8, 8))
    optimizer = run.sgd(model)
    batches = list(run.batches(4))
    with model.no_sync():
        for x, y in batches[:2]:
            classify(model, x, y).backward()
    for x, y in batches[2:]:
        classify(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


@row
def nothing_exchanged(run: Run) -> None:
    """All micro-batches inside no_sync."""
    model = run.wrap(mlp())
    for x, y in run.training(run.sgd(model)):
        for part in range(2):
            with model.no_sync():
                classify(model, x[part::2], y[part::2]).backward()
