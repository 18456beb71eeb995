"""Forwards between two steps that nobody differentiates."""

from __future__ import annotations

import torch
from ways_of_training.networks import classify, mlp, train
from ways_of_training.run import Run
from ways_of_training.table import row


@row
def evaluated_with_gradients(run: Run) -> None:
    """After each step a forward with gradients whose loss nobody differentiates."""
    model = run.wrap(mlp())
    for x, y in run.training(run.sgd(model)):
        classify(model, x, y).backward()
        model.eval()
        run.note(classify(model, x, y))
        model.train()


@row
def first_used_for_evaluation(run: Run) -> None:
    """The wrapped model's very first forwards are evaluations."""
    model = run.wrap(mlp())
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            for x, y in run.batches(2):
                run.note(classify(model, x, y))
    train(run, model)
