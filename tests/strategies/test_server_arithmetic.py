"""The strategies over parameter servers against one plain process and a rank-ordered average."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.marks import slow
from support.processes import run_ranks
from support.server_training import OPTIMIZERS, STEPS, assert_equal, batches, build, state_of, use
from torch import nn
from torch.nn import functional as F

import psengine

VIEWS = {"gradient_as_bucket_view": True}


# ---- sync-server -------------------------------------------------------------------------------------------------


def train_sync(rank: int, world_size: int, address: str, job: str, options: dict[str, Any]) -> Any:
    use(address)
    wrapped = psengine.DistributedDataParallel(build(seed=rank), strategy=psengine.SyncServer(job=job), **options)
    optimizer = OPTIMIZERS["momentum"](wrapped.parameters())
    gradients = []
    for x, y in batches(rank):
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        gradients.append({n: p.grad.clone() for n, p in wrapped.module.named_parameters() if p.requires_grad})
        optimizer.step()
    state = state_of(wrapped.module)
    wrapped.leave()
    wrapped.report(loss=1.0)  # there is nobody to tell any more
    return gradients, state


def rank_ordered_reference(rank: int, _: int, world_size: int) -> dict[str, torch.Tensor]:
    """One process: gradients of each rank's batch, added in rank order in float32, divided by their number."""
    model = build(seed=0)
    replicas = [copy.deepcopy(model) for _ in range(world_size)]
    optimizers = [OPTIMIZERS["momentum"](replica.parameters()) for replica in replicas]
    data = [batches(rank) for rank in range(world_size)]
    for step in range(STEPS):
        for replica, optimizer, batch in zip(replicas, optimizers, data, strict=True):
            optimizer.zero_grad()
            x, y = batch[step]
            F.cross_entropy(replica(x), y).backward()
        for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
            if parameters[0].grad is None:
                continue
            total = parameters[0].grad.clone()
            for parameter in parameters[1:]:
                total += parameter.grad
            for parameter in parameters:
                parameter.grad = total / world_size
        for optimizer in optimizers:
            optimizer.step()
        for replica in replicas[1:]:
            for own, first in zip(replica.buffers(), replicas[0].buffers(), strict=True):
                own.copy_(first)
    return state_of(replicas[0])


@pytest.mark.parametrize(("world_size", "options"), [(3, VIEWS), *(slow(*case) for case in [(2, {}), (4, VIEWS)])])
def test_sync_server_is_bitwise_the_rank_ordered_average(server, world_size, options):
    job = f"sync-{world_size}-{len(options)}"
    results = run_ranks(train_sync, world_size, server.addresses[0], job, options)
    [reference] = run_ranks(rank_ordered_reference, 1, world_size, init_group=False)
    for gradients, state in results:
        assert_equal(state, reference)
        for mine, first in zip(gradients, results[0][0], strict=True):
            assert_equal(mine, first)


# ---- async -------------------------------------------------------------------------------------------------------


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
