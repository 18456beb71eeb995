"""Strategy "diloco-server": workers in collectives and without samples, codecs, weights by samples."""

import os

import pytest
import torch
from support.expectations import raises
from support.processes import run_ranks
from support.server_training import at_servers
from support.waiting import eventually
from torch import nn

import psengine
from psengine.errors import ConfigurationError

# The outer step that averages parameters.
AVERAGES = "outer_lr=1,outer_momentum=0"


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
    return loss.item()


@at_servers(3)
def test_a_merge_does_not_wait_for_workers_in_a_collective(rank, world_size):
    os.environ["PSENGINE_JOB"] = "collective"
    model = psengine.DistributedDataParallel(make_model(), strategy="diloco-server:every=2,grace=0")
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02), model)
    if rank == 2:  # the others form the quorum, and this one comes alone
        eventually(lambda: model.statistics().updates)
    train(model, optimizer, rank, range(2))
    assert psengine.sum(1) == 3
    model.leave()


@at_servers(2)
def test_samples_weigh_and_codecs_encode_differences(rank, world_size):
    for name in (f"diloco-server:every=2,grace=0,{AVERAGES}", "local:every=2", f"diloco:every=2,{AVERAGES}"):
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
            with raises(ConfigurationError, "steps one optimizer"):
                psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
            model.leave()
    for weights in ((0, 0), (0, 5)):  # nobody counts: all count alike; rank 0 counts nothing
        model = psengine.DistributedDataParallel(make_model(), strategy="local:every=1")
        optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        alone = make_model()
        model.batch_weight(weights[rank])
        train(model, optimizer, rank, range(1))
        train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), rank, range(1))
        for parameter, own in zip(model.parameters(), alone.parameters(), strict=True):
            first, second = model._collective.gather(own)
            torch.testing.assert_close(parameter.detach(), second if any(weights) else (first + second) / 2)


@at_servers(2)
def test_parameters_stay_where_all_workers_have_no_samples(rank, world_size):
    for name in ("diloco-server:every=1", "diloco-server:every=1,compress=bf16"):
        os.environ["PSENGINE_JOB"] = name.replace(":", " ")
        model = psengine.DistributedDataParallel(make_model(), strategy=name)
        optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        model.batch_weight(0)
        train(model, optimizer, rank, range(1))
        for parameter, initial in zip(model.parameters(), make_model().parameters(), strict=True):
            torch.testing.assert_close(parameter, initial, rtol=0, atol=0.5)
            assert parameter.abs().sum() > 0
        model.leave()


def switched_after(rank: int, world_size: int, address: str, steps: list[int]) -> list[torch.Tensor]:
    os.environ.update(PSENGINE_SERVERS=address, PSENGINE_JOB=f"switched {world_size}")
    model = psengine.DistributedDataParallel(make_model(), strategy="diloco-server:quorum=2,every=2,grace=0")
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    train(model, optimizer, rank, range(steps[rank]))
    model.switch_strategy("sync")
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("steps", [[3, 2], pytest.param([2, 2, 1], marks=pytest.mark.slow)])
def test_who_is_alone_within_a_round_when_all_conclude_is_merged_alone(server, steps):
    """The others have merged already; they abstain, and nobody waits for them."""
    results = run_ranks(switched_after, len(steps), server.addresses[0], steps)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
