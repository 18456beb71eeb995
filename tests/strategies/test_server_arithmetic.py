"""Strategy "async" with one worker against one plain process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from support.processes import run_ranks
from support.server_training import OPTIMIZERS, STEPS, assert_equal, batches, build, state_of, use
from torch import nn
from torch.nn import functional as F

import psengine


def two_groups(model: nn.Module, name: str) -> torch.optim.Optimizer:
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    others = [p for n, p in model.named_parameters() if not n.endswith("bias") and p.requires_grad]
    return OPTIMIZERS[name]([{"params": biases, "lr": 0.003}, {"params": others}])


def run_plainly(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for x, y in batches(0):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()


def every_optimizer(rank: int, world_size: int, address: str) -> None:
    """Two parameter groups, a scheduler, and clipping."""
    use(address)
    for name in OPTIMIZERS:
        plain = build(seed=0)
        run_plainly(plain, two_groups(plain, name))
        strategy = psengine.AsyncServer(max_staleness=0, job=f"alone-{name}")
        wrapped = psengine.DistributedDataParallel(build(seed=0), strategy=strategy)
        optimizer = psengine.DistributedOptimizer(two_groups(wrapped.module, name), wrapped)
        run_plainly(wrapped, optimizer)
        assert_equal(state_of(wrapped.module), state_of(plain))
        strategy.close()


KERNELS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, weight_decay=0.01),
    "momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adam": functools.partial(torch.optim.Adam, lr=0.01, weight_decay=0.01, amsgrad=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, maximize=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.05, lr_decay=0.1),
}


def every_kernel(rank: int, world_size: int, address: str) -> None:
    """Fused kernels round otherwise than plain ones, and not alike in all elements of a tensor."""
    use(address)
    different = {}
    for (name, make), kernel in itertools.product(KERNELS.items(), ("fused", "foreach")):
        states = []
        for is_plain in (True, False):
            model = build(seed=0)
            parameters = [p for p in model.parameters() if p.requires_grad]
            optimizer, trained = make(parameters, **{kernel: True}), model
            if not is_plain:
                strategy = psengine.AsyncServer(job=f"{name}-{kernel}")
                trained = psengine.DistributedDataParallel(model, strategy=strategy)
                optimizer = psengine.DistributedOptimizer(optimizer, trained)
            run_plainly(trained, optimizer)
            momenta = optimizer.state_dict()["state"]
            states.append({**state_of(model), **{f"{i}.{n}": t for i in momenta for n, t in momenta[i].items()}})
            if not is_plain:
                strategy.close()
        different[name, kernel] = [key for key in states[0] if not torch.equal(states[0][key], states[1][key])]
    assert not any(different.values()), different


@pytest.mark.parametrize("train", [every_optimizer, every_kernel])
def test_async_with_one_worker_is_bitwise_plain_training(server, train):
    run_ranks(train, 1, server.addresses[0], init_group=False)
