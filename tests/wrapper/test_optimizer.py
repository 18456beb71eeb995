"""DistributedOptimizer: a true optimizer of the wrapped class."""

from __future__ import annotations

import copy
import functools
import io
import warnings

import pytest
import torch
from support.expectations import raises
from support.native_twins import Net, seeded
from support.processes import in_ranks, run_ranks

from psengine import DistributedDataParallel, DistributedOptimizer
from psengine.tracing.timeline import recorder

CLASSES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


def wrapped_equals_unwrapped(rank: int, world_size: int, name: str) -> None:
    ours = DistributedDataParallel(seeded(Net))
    plain = DistributedDataParallel(seeded(Net))
    inner = CLASSES[name](ours.parameters())
    optimizer, reference = DistributedOptimizer(inner, ours), CLASSES[name](plain.parameters())
    assert isinstance(optimizer, type(reference))
    assert type(optimizer).__name__ == f"Distributed{type(reference).__name__}"
    schedulers = [torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.5) for o in (optimizer, reference)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    for step in range(6):
        x = torch.randn(2, 4) + rank
        for model, opt in ((ours, optimizer), (plain, reference)):
            opt.zero_grad()
            loss = model(x, use_spare=True).pow(2).mean()
            if model is ours and step >= 4:
                scaler.scale(loss).backward()
                scaler.step(opt)
                scaler.update()
            elif step == 3:
                loss.backward()
                assert opt.step(lambda: 42.0) == 42.0
            else:
                loss.backward()
                opt.step()
        for scheduler in schedulers:
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, q)  # a loss scale that is a power of two is exact
    assert calls == ["post"] * 6

    state = optimizer.state_dict()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    fresh = CLASSES[name](seeded(Net).parameters())
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    again = DistributedOptimizer(CLASSES[name](ours.parameters()), ours)
    again.load_state_dict(reference.state_dict())
    assert str(again.state_dict()) == str(reference.state_dict())
    duplicate = copy.deepcopy(again)
    assert type(duplicate) is type(reference), "a copy is a plain optimizer"
    assert str(duplicate.state_dict()) == str(reference.state_dict())


@pytest.mark.parametrize("name", CLASSES)
def test_wrapped_equals_unwrapped(name):
    run_ranks(wrapped_equals_unwrapped, 2, name)


@in_ranks(2)
def test_a_scheduler_may_be_made_before(rank, world_size):
    """As torch's tutorials write it: model, optimizer, scheduler; then what is distributed."""
    plain, module = seeded(Net), seeded(Net)
    pairs = []
    for network in (plain, module):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=2)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        pairs.append((optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], milestones=[2])))
    native, ours = torch.nn.parallel.DistributedDataParallel(plain), DistributedDataParallel(module)
    (reference, reference_scheduler), (inner, scheduler) = pairs
    optimizer = DistributedOptimizer(inner, ours)
    first = recorder.begin()
    rates = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step")
        for step in range(5):
            for model, opt, schedule in ((native, reference, reference_scheduler), (ours, optimizer, scheduler)):
                torch.manual_seed(10 * rank + step)
                opt.zero_grad()
                model(torch.randn(2, 4), use_spare=True).pow(2).mean().backward()
                opt.step()
                schedule.step()
            rates.append(scheduler.get_last_lr())
            assert rates[-1] == reference_scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]
            for p, q in zip(module.parameters(), plain.parameters(), strict=True):
                assert torch.equal(p, q)
    assert len({rate for (rate,) in rates}) > 3
    steps = [name for name, *_ in recorder.end(first) if name == "optimizer step"]
    assert len(steps) == 5, "the scheduler's step bypassed the strategy"
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # as does a second one, whose first step would warn
    assert type(copy.copy(optimizer)) is torch.optim.SGD


@in_ranks(1)
def test_errors(rank, world_size):
    model = DistributedDataParallel(seeded(Net))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with raises(TypeError, "expected a torch.optim.Optimizer (got int)"):
        DistributedOptimizer(3, model)
    with raises(TypeError, "psengine.DistributedDataParallel (got Net)"):
        DistributedOptimizer(optimizer, model.module)
    with raises(ValueError, "already"):
        DistributedOptimizer(DistributedOptimizer(optimizer, model), model)
    stranger = torch.optim.SGD(
        [{"params": model.module.body.parameters()}, {"params": [torch.nn.Parameter(torch.ones(3))]}]
    )
    with raises(ValueError, "parameter 0 of group 1 (shape (3,)) is not one of the model's"):
        DistributedOptimizer(stranger, model)
    for with_scheduler in (False, True):
        patched = torch.optim.SGD(model.parameters(), lr=0.1)
        if with_scheduler:
            torch.optim.lr_scheduler.StepLR(patched, 1)
        patched.step = functools.wraps(patched.step)(lambda *_: None)  # carries the scheduler's mark
        with raises(ValueError, "step was replaced (expected SGD.step or a scheduler's"):
            DistributedOptimizer(patched, model)
    scheduled = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    DistributedOptimizer(scheduled, model)
    with raises(ValueError, "is gone. Fix: keep it"):
        scheduled.step()
