"""GradScaler in front of every strategy's optimizer, against one plain process."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from support.expectations import raises
from support.processes import run_ranks
from support.server_training import assert_equal, at_servers, network, state_of, use
from torch import nn

import psengine

STEPS, OVERFLOWS_AT, RELOADS_AT = 8, 3, 5
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "plain": {"foreach": False, "fused": False},
    "fused": {"fused": True},
}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
}
CASES = list(itertools.product(OPTIMIZERS, [False, True], ["plain", "fused"]))


def train_scaled(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, unscales: bool
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train with a scale that grows, and once overflows; return the weights and the scales.

    ``unscales``: clip in between, as torch's documentation does.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    scales = []
    for step in range(STEPS):
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(inputs).pow(2).mean() * (torch.inf if step == OVERFLOWS_AT else 1.0)
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        scales.append(scaler.get_scale())
        if step == RELOADS_AT:
            optimizer.load_state_dict(optimizer.state_dict())
    return state_of(model), scales


def train_plainly(name: str, implementation: str, *, unscales: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    optimizer_class, options = OPTIMIZERS[name]
    model = network()
    optimizer = optimizer_class(model.parameters(), **options, **IMPLEMENTATIONS[implementation])
    return train_scaled(model, optimizer, unscales=unscales)


def scaled_is_plain(rank: int, world_size: int, address: str, strategy: str) -> None:
    """All ranks have the same data, so that their average is each one's gradient."""
    use(address)
    for name, unscales, implementation in CASES:
        os.environ["PSENGINE_JOB"] = f"{strategy}-{implementation}-{name}-{unscales}"
        expected, scales = train_plainly(name, implementation, unscales=unscales)
        wrapped = psengine.DistributedDataParallel(network(), strategy=strategy)
        optimizer_class, options = OPTIMIZERS[name]
        inner = optimizer_class(wrapped.parameters(), **options, **IMPLEMENTATIONS[implementation])
        optimizer = psengine.DistributedOptimizer(inner, wrapped)
        _, own_scales = train_scaled(wrapped, optimizer, unscales=unscales)
        assert own_scales == scales
        assert len(set(scales)) > 2
        assert_equal(state_of(wrapped.module), expected)
        wrapped.leave()


@pytest.mark.parametrize(("strategy", "world_size"), [("sync", 2), ("sync-server", 2), ("async", 1)])
def test_a_gradient_scaler_is_that_of_plain_training(server, strategy, world_size):
    run_ranks(scaled_is_plain, world_size, server.addresses[0], strategy)


@at_servers(1)
def test_servers_refuse_a_scale_that_only_a_fused_kernel_divides_by(rank, world_size):
    wrapped = psengine.DistributedDataParallel(network(), strategy=psengine.AsyncServer(job="own scale"))
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1, fused=True), wrapped)
    before = state_of(wrapped.module)
    wrapped(torch.ones(2, 5)).sum().backward()
    optimizer.grad_scale = torch.tensor(8.0)
    with raises(psengine.ConfigurationError, "optimizer.grad_scale (expected it unset, got 8.0)"):
        optimizer.step()
    assert_equal(state_of(wrapped.module), before)
    wrapped.leave()
