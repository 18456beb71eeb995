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
