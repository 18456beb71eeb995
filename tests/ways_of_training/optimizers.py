"""Every optimizer, and what scripts do to them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from ways_of_training.networks import classify, mlp, train
from ways_of_training.run import Run
from ways_of_training.table import refused, row


@row
def adamw_fused(run: Run) -> None:
    """AdamW with fused=True, twelve steps."""
    model = run.wrap(mlp())
    train(run, model, 12, optimizer=run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01, fused=True), model))


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
    for step, (x, y) in enumerate(run.training(optimizer, 4)):
        if step == 2:
            optimizer.add_param_group({"params": list(model.module[2].parameters()), "lr": 0.01})
        classify(model, x, y).backward()


@row(one_worker=refused("optimizer.state is only a copy"))
def state_cleared(run: Run) -> None:
    """optimizer.state is emptied in mid-run."""
    model = run.wrap(mlp())
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
    for step, (x, y) in enumerate(run.training(optimizer, 4)):
        if step == 2:
            optimizer.state_dict()
            optimizer.state.clear()
        classify(model, x, y).backward()


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


@row
def rate_in_a_tensor(run: Run) -> None:
    """A learning rate that is a tensor, with foreach=False, and a scheduler."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model, lr=torch.tensor(0.1), foreach=False)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for x, y in run.batches(5):
        optimizer.zero_grad()
        classify(model, x, y).backward()
        optimizer.step()
        schedule.step()
        run.note(float(optimizer.param_groups[0]["lr"]))


@row
def rates_set_by_hand(run: Run) -> None:
    """param_groups are written to: rate, decay and momentum."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    for step, (x, y) in enumerate(run.training(optimizer, 4)):
        for group in optimizer.param_groups:
            group.update(lr=0.1 / (step + 1), weight_decay=0.01 * step, momentum=0.9 - 0.1 * step)
        classify(model, x, y).backward()


@row
def state_reset_by_loading(run: Run) -> None:
    """A state without any entry is loaded in mid-run."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    for step, (x, y) in enumerate(run.training(optimizer, 4)):
        if step == 2:
            optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})
        classify(model, x, y).backward()


@row
def hooks_of_optimizers(run: Run) -> None:
    """Hooks of this optimizer and of all, each once, also after a state was loaded."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    calls: list[int] = []

    def noting(number: int) -> Callable[..., None]:
        return lambda owner, arguments, options: calls.append(number) if owner is optimizer else None

    handles = [register_optimizer_step_pre_hook(noting(1)), register_optimizer_step_post_hook(noting(2))]
    optimizer.register_step_pre_hook(noting(3))
    optimizer.register_step_post_hook(noting(4))
    try:
        train(run, model, 2, optimizer=optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        train(run, model, 2, optimizer=optimizer)
    finally:
        for handle in handles:
            handle.remove()
    run.note(torch.tensor(calls))


@row
def closure_replaced_by_a_hook(run: Run) -> None:
    """A hook before the step gives it another closure, whose gradients count."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    (x, y), *_ = run.batches(1)

    def doubled() -> float:
        optimizer.zero_grad()
        loss = classify(model, x, y) * 2
        loss.backward()
        return loss.item()

    optimizer.register_step_pre_hook(lambda owner, arguments, options: ((owner,), {"closure": doubled}))
    run.note(optimizer.step(lambda: 7.0))


def halve_rate(model: Any, optimizer: torch.optim.Optimizer) -> None:
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5).step()


def clamp_weights(model: Any, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        next(model.parameters()).clamp_(-0.1, 0.1)


def load_weights(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.module.load_state_dict({name: tensor + 1 for name, tensor in model.module.state_dict().items()})


@row
def changes_between_backward_and_step(run: Run) -> None:
    """The rate, and weights, are changed after a backward."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    changes = (halve_rate, clamp_weights, load_weights, halve_rate)
    for change, (x, y) in zip(changes, run.training(optimizer, len(changes)), strict=True):
        classify(model, x, y).backward()
        change(model, optimizer)
