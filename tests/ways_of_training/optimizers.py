"""Every optimizer, and what scripts do to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from ways_of_training.networks import classify, mlp
from ways_of_training.run import Run
from ways_of_training.table import left_out, refused, row

Make = Callable[[Any], torch.optim.Optimizer]
# The second: a torch built for CUDA, where there is no driver.
NO_ACCELERATOR = "CUDA error" if torch.version.cuda else "Cannot access accelerator device when none is available"
NOT_AT_SERVERS = refused("expected one of SGD, Adam, AdamW, Adagrad, RMSprop")


def train(run: Run, make: Make, module: nn.Module | None = None, steps: int = 4) -> Any:
    model = run.wrap(mlp() if module is None else module)
    optimizer = run.optimizer(make(model.parameters()), model)
    for x, y in run.training(optimizer, steps):
        loss = classify(model, x, y)
        loss.backward()
        run.note(loss)
    return optimizer


@row
def sgd_fused(run: Run) -> None:
    """SGD with fused=True."""
    train(run, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True), steps=8)


@row
def adam(run: Run) -> None:
    """Adam with amsgrad and weight decay."""
    train(run, lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.01))


@row
def adam_fused(run: Run) -> None:
    """Adam with fused=True, twelve steps."""
    train(run, lambda p: torch.optim.Adam(p, lr=0.01, fused=True), steps=12)


@row
def adamw(run: Run) -> None:
    """AdamW."""
    train(run, lambda p: torch.optim.AdamW(p, lr=0.01))


@row
def adamw_fused(run: Run) -> None:
    """AdamW with fused=True, twelve steps."""
    train(run, lambda p: torch.optim.AdamW(p, lr=0.01, fused=True), steps=12)


@row
def adagrad_fused(run: Run) -> None:
    """Adagrad with fused=True."""
    train(run, lambda p: torch.optim.Adagrad(p, lr=0.05, fused=True), steps=8)


@row(one_worker=refused("one optimizer"))
def two_optimizers_of_one_model(run: Run) -> None:
    """SGD for the first layer and Adam for the rest."""
    model = run.wrap(mlp())
    first, *rest = model.module
    optimizers = [
        run.optimizer(torch.optim.SGD(first.parameters(), lr=0.1), model),
        run.optimizer(torch.optim.Adam(nn.Sequential(*rest).parameters(), lr=0.01), model),
    ]
    for x, y in run.batches():
        model.zero_grad()
        classify(model, x, y).backward()
        for optimizer in optimizers:
            optimizer.step()


@row
def closure(run: Run) -> None:
    """Adam with a closure."""
    model = run.wrap(mlp())
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
    for x, y in run.batches():

        def step(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = classify(model, x, y)
            loss.backward()
            return loss

        run.note(optimizer.step(step))


@row
def parameter_groups(run: Run) -> None:
    """Three groups: no decay for biases, another rate for the head, one group added after wrapping."""
    model = run.wrap(mlp())
    body, head = model.module[:-1], model.module[-1]
    groups = [
        {"params": [p for p in body.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in body.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(groups, lr=0.01)
    plain.add_param_group({"params": list(head.parameters()), "lr": 0.1, "betas": (0.8, 0.9)})
    optimizer = run.optimizer(plain, model)
    for x, y in run.training(optimizer):
        classify(model, x, y).backward()


@row(one_worker=refused("trains the parameters that the optimizer had"))
def group_added_late(run: Run) -> None:
    """A parameter group is added in the third step."""
    model = run.wrap(mlp())
    optimizer = run.optimizer(torch.optim.SGD(model.module[0].parameters(), lr=0.1), model)
    for step, (x, y) in enumerate(run.batches(4)):
        if step == 2:
            optimizer.add_param_group({"params": list(model.module[2].parameters()), "lr": 0.01})
        optimizer.zero_grad()
        classify(model, x, y).backward()
        optimizer.step()


@row(one_worker=refused("one optimizer"))
def optimizer_replaced(run: Run) -> None:
    """Adam for two steps, then SGD."""
    model = run.wrap(mlp())
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
    for step, (x, y) in enumerate(run.batches(4)):
        if step == 2:
            optimizer = run.sgd(model)
        optimizer.zero_grad()
        classify(model, x, y).backward()
        optimizer.step()


@row(one_worker=refused("optimizer.state is only a copy"))
def state_cleared(run: Run) -> None:
    """optimizer.state is emptied in mid-run."""
    model = run.wrap(mlp())
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
    for step, (x, y) in enumerate(run.batches(4)):
        if step == 2:
            optimizer.state_dict()
            optimizer.state.clear()
        optimizer.zero_grad()
        classify(model, x, y).backward()
        optimizer.step()


@row
def zeroed_at_odd_places(run: Run) -> None:
    """zero_grad between forward and backward, after the step, twice, on the model, and not at all."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    for step, (x, y) in enumerate(run.batches(6)):
        if step == 1:
            optimizer.zero_grad()
        loss = classify(model, x, y)
        if step in (2, 5):
            optimizer.zero_grad(set_to_none=step == 2)
        if step == 3:
            model.zero_grad()
            model.zero_grad()
        loss.backward()
        optimizer.step()


@row
def step_without_backward(run: Run) -> None:
    """optimizer.step twice a backward, and once before any."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    optimizer.step()
    for x, y in run.batches():
        optimizer.zero_grad()
        classify(model, x, y).backward()
        optimizer.step()
        optimizer.step()


@row(
    one_worker=refused("optimizer"),
    sync_server=left_out("ZeroRedundancyOptimizer exchanges parameters over a process group of its own"),
)
def sharded_optimizer_state(run: Run) -> None:
    """ZeroRedundancyOptimizer over Adam."""
    train(run, lambda p: ZeroRedundancyOptimizer(p, torch.optim.Adam, lr=0.01))


@row(
    native=refused(NO_ACCELERATOR),
    sync=refused(NO_ACCELERATOR),
    sync_server=refused(
        "CUDA error" if torch.version.cuda else "takes no communication hook", "it is one under the surface"
    ),
    one_worker=left_out("workers step each parameter in backward; servers step all at once"),
)
def optimizer_in_backward(run: Run) -> None:
    """_apply_optimizer_in_backward: each parameter is stepped as soon as its average is there."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    module = mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = run.wrap(module)
    for x, y in run.batches():
        classify(model, x, y).backward()
