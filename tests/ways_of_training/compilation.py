"""torch.compile around, inside and under the wrapper."""

from __future__ import annotations

from typing import Any

import torch
from ways_of_training.networks import classify, mlp
from ways_of_training.run import Run
from ways_of_training.table import row


def train(run: Run, model: Any, called: Any) -> None:
    for x, y in run.training(run.sgd(model)):
        loss = classify(called, x, y)
        loss.backward()
        run.note(loss)


@row(slow=True)
def compiled_around(run: Run) -> None:
    """The wrapped model compiled, backend eager."""
    torch._dynamo.reset()
    model = run.wrap(mlp(), bucket_cap_mb=25)
    train(run, model, torch.compile(model, backend="eager"))


@row(slow=True)
def compiled_around_with_autograd(run: Run) -> None:
    """The wrapped model compiled, backend aot_eager."""
    torch._dynamo.reset()
    model = run.wrap(mlp(), bucket_cap_mb=25)
    train(run, model, torch.compile(model, backend="aot_eager"))


@row(slow=True)
def compiled_inside(run: Run) -> None:
    """A compiled module that is wrapped, backend aot_eager."""
    torch._dynamo.reset()
    model = run.wrap(torch.compile(mlp(), backend="aot_eager"), bucket_cap_mb=25)
    train(run, model, model)


@row(slow=True)
def compiled_in_place(run: Run) -> None:
    """module.compile() before wrapping, backend eager."""
    torch._dynamo.reset()
    module = mlp()
    module.compile(backend="eager")
    model = run.wrap(module, bucket_cap_mb=25)
    train(run, model, model)


@row(slow=True)
def compiled_step(run: Run) -> None:
    """The loss function compiled, backend eager, with the wrapped model as an argument."""
    torch._dynamo.reset()
    model = run.wrap(mlp(), bucket_cap_mb=25)
    train_loss = torch.compile(classify, backend="eager")
    for x, y in run.training(run.sgd(model)):
        train_loss(model, x, y).backward()
