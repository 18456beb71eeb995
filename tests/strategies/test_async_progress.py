"""Strategy "async" says once, with rate, momentum and staleness, that training gets nowhere."""

from __future__ import annotations

import logging

import torch
from support.processes import run_ranks
from support.server_training import use
from torch import nn

import psengine


def train(rank: int, world_size: int, address: str, rate: float, factor: float, reports: bool) -> list[str]:
    """What the strategy logs in 210 steps of a small regression; the losses are multiplied by ``factor``."""
    use(address)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("psengine.strategies.servers.asynchronous").addHandler(handler)
    torch.manual_seed(0)
    strategy = psengine.AsyncServer(job=f"progress-{rate}-{factor}-{reports}")
    model = psengine.DistributedDataParallel(nn.Linear(8, 1), strategy=strategy)
    inner = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    optimizer = psengine.DistributedOptimizer(inner, model)
    psengine.barrier()  # both are members from the first step to the last
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(rank))
    for _ in range(210):
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean() * factor
        loss.backward()
        if reports:
            model.report(loss=loss)
        optimizer.step()
    psengine.barrier()
    model.leave()
    return [record for record in records if "the optimizer has" in record]


def test_a_loss_that_does_not_fall_or_is_not_finite_is_said_once(server):
    address = server.addresses[0]
    for told in run_ranks(train, 2, address, 1e-9, 1.0, True):
        [line] = told
        assert "step 200: the loss began at " in line
        assert "the optimizer has lr=1e-09, momentum=0.9, and gradients were applied with a staleness of " in line
        assert "divide the rate by the number of workers (2 here)" in line
    [[line]] = run_ranks(train, 1, address, 100.0, 1.0, True, init_group=False)
    assert "the loss is not finite; the optimizer has lr=100.0" in line
    [[line]] = run_ranks(train, 1, address, 0.01, float("nan"), False, init_group=False)
    assert "step 1: gradients are not finite" in line
    assert run_ranks(train, 2, address, 0.01, 1.0, True) == [[], []]
