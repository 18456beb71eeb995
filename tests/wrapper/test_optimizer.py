"""DistributedOptimizer: a true optimizer of the wrapped class."""

import functools

import pytest
import torch
from support.expectations import raises
from support.native_twins import Net, seeded
from support.processes import in_ranks

from psengine import DistributedDataParallel, DistributedOptimizer


@in_ranks(1)
def test_errors(rank, world_size):
    model = DistributedDataParallel(seeded(Net))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with raises(TypeError, "expected a torch.optim.Optimizer and a model", "(got int and DistributedDataParallel)"):
        DistributedOptimizer(3, model)
    with raises(TypeError, "psengine.DistributedDataParallel (got SGD and Net)"):
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


@in_ranks(1)
def test_a_scheduler_made_before_sees_the_steps(rank, world_size):
    model = DistributedDataParallel(seeded(Net))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert DistributedOptimizer(optimizer, model) is optimizer
    assert isinstance(optimizer, torch.optim.SGD)
    optimizer.step()
    scheduler.step()  # would warn that no step came before
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
