"""Strategies "local-server" and "diloco-server": workers at their own pace, killed ones, codecs, weights by samples."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from support.expectations import raises
from support.processes import run_ranks, run_ranks_to_any_end
from support.server_process import running_server
from torch import nn

import psengine
from psengine.errors import ConfigurationError
from psengine.strategies.registry import resolve_strategy


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 37), nn.Tanh(), nn.Linear(37, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> float:
    loss = torch.zeros(())
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1000 * rank + step))
        loss = (model(x) - x[:, :2]).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss)


def at_its_own_pace(rank: int, world_size: int, address: str, name: str) -> tuple[float, float, int]:
    os.environ.update(
        PSENGINE_SERVERS=address, PSENGINE_JOB=name.partition(":")[0], PSENGINE_WORKER=str(rank), PSENGINE_WORKERS="3"
    )
    model = psengine.DistributedDataParallel(make_model(), strategy=name)
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02), model)
    first = train(model, optimizer, rank, range(1))
    for round_ in range(12):
        if rank == 2 and round_ == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02 * rank)
        last = train(model, optimizer, rank, range(1 + 5 * round_, 6 + 5 * round_))
    late = model.statistics().updates or 0
    model.leave()
    return first, last, late


@pytest.mark.parametrize("name", ["diloco-server:quorum=2,every=5", "local-server:every=5"])
def test_the_others_go_on_after_a_worker_was_killed(name):
    with running_server(lease_s=1.0) as server:
        results = run_ranks_to_any_end(at_its_own_pace, 3, server.addresses[0], name, init_group=False)
    assert results[2].exit_code == -signal.SIGKILL
    for result in results[:2]:
        assert result.error is None, result.error
        first, last, updates = result.value
        assert last < first / 2
        assert updates >= 12


def weighed_and_encoded(rank: int, world_size: int, address: str) -> None:
    os.environ.update(PSENGINE_SERVERS=address)
    for name in ("local-server:every=2", "diloco-server:every=2,grace=0,outer_lr=1,outer_momentum=0"):
        for compress in ("", ",compress=bf16"):
            os.environ["PSENGINE_JOB"] = f"{name[:5]}{compress[-4:]}"
            model = psengine.DistributedDataParallel(make_model(), strategy=name + compress)
            optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
            alone = make_model()
            plain = torch.optim.SGD(alone.parameters(), lr=0.1)
            for step in range(2):
                model.batch_weight(8 if rank == 0 else 24)
                train(model, optimizer, rank, range(step, step + 1))
                train(alone, plain, rank, range(step, step + 1))
            collective = model._collective
            for parameter, own in zip(model.parameters(), alone.parameters(), strict=True):
                values = collective.gather(parameter)
                assert torch.equal(*values)
                first, second = collective.gather(own)
                wanted = (first * 8 + second * 24) / 32
                bits = 2e-3 if compress else 1e-6
                torch.testing.assert_close(parameter.detach(), wanted, rtol=0, atol=bits)
            with raises(ConfigurationError, "counts the steps of one optimizer"):
                psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
            model.leave()


def test_samples_weigh_and_codecs_encode_differences():
    with running_server() as server:
        run_ranks(weighed_and_encoded, 2, server.addresses[0])


@pytest.mark.parametrize(
    ("specification", "message"),
    [
        ("local-server:every=0", "every is a number"),
        ("local-server:quorum=2", "unknown option 'quorum'"),
        ("diloco-server:quorum=0", "quorum is a number of workers"),
        ("diloco-server:grace=-1", r"grace \(expected a share of a round: 0 to 100, got -1\)"),
        ("diloco-server:outer_lr=none", "outer_lr"),
    ],
)
def test_wrong_options(specification, message):
    with pytest.raises(ConfigurationError, match=message):
        resolve_strategy(specification)
