"""Strategy "async" with one worker against one plain process, with every optimizer and each of its kernels."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from support.processes import run_ranks
from support.server_training import STEPS, batches, build, state_of, use
from torch import nn
from torch.nn import functional as F

import psengine

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, weight_decay=0.01),
    "momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adam": functools.partial(torch.optim.Adam, lr=0.01, weight_decay=0.01, amsgrad=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, maximize=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.05, lr_decay=0.1),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
}
# Fused kernels round otherwise than plain ones, and not alike in all elements of a tensor. RMSprop has none.
KERNELS = [{}, {"fused": True}, {"foreach": True}]
CASES = [case for case in itertools.product(OPTIMIZERS, KERNELS) if case != ("rmsprop", {"fused": True})]


def two_groups(model: nn.Module, name: str, kernel: dict[str, bool]) -> torch.optim.Optimizer:
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    others = [p for n, p in model.named_parameters() if not n.endswith("bias") and p.requires_grad]
    return OPTIMIZERS[name]([{"params": biases, "lr": 0.003}, {"params": others}], **kernel)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """With a scheduler, and clipping; the weights and the optimizer's state."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for x, y in batches(0):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
    momenta = optimizer.state_dict()["state"]
    found = state_of(getattr(model, "module", model))
    return {**found, **{f"{i}.{n}": value for i in momenta for n, value in momenta[i].items()}}


def every_optimizer(rank: int, world_size: int, address: str) -> None:
    use(address)
    different = {}
    for name, kernel in CASES:
        model = build(seed=0)
        plain = train(model, two_groups(model, name, kernel))
        job = " ".join((name, *kernel))
        strategy = psengine.AsyncServer(max_staleness=0, job=job)
        wrapped = psengine.DistributedDataParallel(build(seed=0), strategy=strategy)
        optimizer = psengine.DistributedOptimizer(two_groups(wrapped.module, name, kernel), wrapped)
        ours = train(wrapped, optimizer)
        strategy.close()
        different[job] = [key for key in plain if not torch.equal(plain[key], ours[key])]
    assert not any(different.values()), different


def test_async_with_one_worker_is_bitwise_plain_training(server):
    run_ranks(every_optimizer, 1, server.addresses[0], init_group=False)
