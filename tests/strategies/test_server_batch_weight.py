"""Batches of different sizes over parameter servers: trained like one process that has them all."""

from __future__ import annotations

import pytest
import torch
from support.processes import run_ranks
from support.server_process import running_server
from torch import nn

import psengine
from psengine.errors import ConfigurationError

STEPS = 6
# Per step the samples of rank 0 and rank 1; nobody's, once.
SIZES = [(5, 2), (1, 8), (4, 4), (0, 3), (6, 0), (3, 2)]


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)).double()


def batch(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    size = SIZES[step][rank]
    return torch.randn(size, 6, generator=generator).double(), torch.randint(0, 3, (size,), generator=generator)


def loss_of(model, x, y):
    # The mean over no samples is NaN; a rank without samples contributes nothing, whatever its gradient is.
    return nn.functional.cross_entropy(model(x), y, reduction="sum") / max(len(y), 1)


def in_one_process():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [batch(step, rank) for rank in (0, 1)]
        loss_of(model, *(torch.cat(part) for part in zip(*parts, strict=True))).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train(rank, world_size, address, strategy):
    model = psengine.DistributedDataParallel(build(), strategy=f"{strategy}", gradient_as_bucket_view=rank == 1)
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), model)
    for step in range(STEPS):
        x, y = batch(step, rank)
        model.batch_weight = len(y)
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    parameters = [p.detach() for p in model.module.parameters()]
    model.strategy.close()
    return parameters


@pytest.fixture(scope="module")
def server():
    with running_server(shards=2) as process:
        yield process


def test_uneven_batches_train_like_one_process(server, monkeypatch):
    monkeypatch.setenv("PSENGINE_SERVERS", server.addresses[0])
    first, second = run_ranks(train, 2, server.addresses[0], "sync-server")
    for ours, theirs, plain in zip(first, second, in_one_process(), strict=True):
        assert torch.equal(ours, theirs)
        assert torch.allclose(ours, plain, rtol=1e-12, atol=1e-14)


def refuse(rank, world_size):
    model = psengine.DistributedDataParallel(build(), strategy="async")
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
    model.batch_weight = 4
    optimizer.zero_grad()
    with pytest.raises(ConfigurationError, match=r"server averages nothing.*Fix: scale the learning rate"):
        model(torch.randn(4, 6).double()).sum().backward()
    model.strategy.close()
    strategy = psengine.SyncServer()
    for weight in (-1, float("nan"), 2e12):
        with pytest.raises(ConfigurationError, match="expected 0 to 1e"):
            strategy.weigh(weight)


def test_what_is_refused(server, monkeypatch):
    monkeypatch.setenv("PSENGINE_SERVERS", server.addresses[0])
    monkeypatch.setenv("PSENGINE_JOB", "refused")
    run_ranks(refuse, 1, init_group=False)
