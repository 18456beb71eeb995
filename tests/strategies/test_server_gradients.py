"""Which gradients count under the server strategies: accumulated, unused, undefined, not finite, changed late."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.expectations import raises
from support.processes import run_ranks
from support.server_training import assert_equal, at_servers, batches, build, state_of, use, wrap
from torch import nn
from torch.nn import functional as F

import psengine
from psengine.errors import ConfigurationError, ReductionError


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3)
        self.never = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, use_left: bool) -> torch.Tensor:
        return self.left(x) if use_left else self.right(x)


def use_branches(rank: int, world_size: int, address: str, name: str, native: bool) -> dict[str, torch.Tensor]:
    use(address)
    torch.manual_seed(0)
    model = Branches()
    if native:
        wrapped: Any = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    else:
        wrapped = psengine.DistributedDataParallel(
            model, find_unused_parameters=True, strategy=f"{name}:job=branches-{name}"
        )
        optimizer = psengine.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1), wrapped
        )
    generator = torch.Generator().manual_seed(rank)
    for step in range(6):
        optimizer.zero_grad()
        # Left alone, right alone, then both branches on different ranks.
        use_left = step < 2 or (step >= 4 and rank % 2 == 0)
        wrapped(torch.randn(4, 6, generator=generator), use_left).square().sum().backward()
        optimizer.step()
    state = state_of(model)
    if not native:
        wrapped.leave()
    return state


@pytest.mark.parametrize(("strategy", "workers"), [("sync-server", 2), ("async", 1)])
def test_parameters_that_nobody_uses_are_left_alone(server, strategy, workers):
    native, *_ = run_ranks(use_branches, workers, "", "", True)
    for ours in run_ranks(use_branches, workers, server.addresses[0], strategy, False):
        assert_equal(ours, native)  # dividing by two before or after adding gives the same bits


def test_sparse_gradients_are_refused_before_any_server_is_met():
    """Else the others would meet there, and wait."""
    for strategy in (
        psengine.AsyncServer(servers="tcp://127.0.0.1:1"),
        psengine.SyncServer(servers="tcp://127.0.0.1:1"),
    ):
        with pytest.raises(ConfigurationError, match=r"sparse gradients of 'tokens\.weight'.*sparse=False"):
            psengine.DistributedDataParallel(
                nn.ModuleDict({"tokens": nn.Embedding(5, 3, sparse=True)}), strategy=strategy
            )


@at_servers(1)
def test_a_gradient_that_is_not_finite_changes_nothing(rank, world_size):
    wrapped = wrap(psengine.AsyncServer(job="poison"))
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1), wrapped)
    before = {n: p.detach().clone() for n, p in wrapped.module.named_parameters()}
    x, y = batches(0)[0]
    (F.cross_entropy(wrapped(x), y) * float("nan")).backward()
    optimizer.step()
    assert_equal(before, {n: p.detach() for n, p in wrapped.module.named_parameters()})
    [worker] = wrapped.strategy.session.status()[0]["jobs"]["poison"]["workers"]
    assert worker["refused"] > 0
    wrapped.leave()


class LeftOrRight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(300, 300), nn.Linear(300, 300)
        self.register_buffer("mask", torch.full((5, 5), float("-inf")).triu(1))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor, use_left: bool = True) -> torch.Tensor:
        self.seen += 1
        return self.left(x) if use_left else self.right(x)


def branches(rank: int, world_size: int, address: str, name: str, options: dict[str, Any]) -> Any:
    use(address)
    torch.manual_seed(0)
    model = LeftOrRight()
    strategies = {"sync": psengine.SyncAllReduce, "sync-server": psengine.SyncServer, "async": psengine.AsyncServer}
    wrapped = psengine.DistributedDataParallel(
        model,
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
        bucket_cap_mb=0.1,
        strategy=strategies[name](**options),
    )
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), wrapped)
    generator = torch.Generator().manual_seed(rank)
    for step in range(6):
        optimizer.zero_grad()
        # On both ranks the same branch, then one each: nobody may wait for a gradient that never comes.
        wrapped(torch.randn(4, 300, generator=generator), step % 2 == (rank if step > 3 else 0)).sum().backward()
        optimizer.step()
    state = state_of(model)
    wrapped.leave()
    return state


def test_buckets_that_nobody_uses_are_skipped_alike(server):
    ours = run_ranks(branches, 2, server.addresses[0], "sync-server", {"job": "skip"})
    # Native DDP itself aborts where ranks use different branches.
    oracle = run_ranks(branches, 2, "", "sync", {})
    for name, tensor in oracle[0].items():
        if name != "seen":  # on rank 1 the last forward's, until the next begins
            assert torch.equal(ours[0][name], tensor)
            assert torch.equal(ours[1][name], tensor)


def test_a_bound_does_not_wait_for_branches_that_a_worker_does_not_use(server):
    options = {"job": "heads", "max_staleness": 0, "timeout_s": 20}
    first, second = run_ranks(branches, 2, server.addresses[0], "async", options)
    # Infinite buffers are nobody's mistake, and every worker keeps its own, from what it found when it came.
    assert first["seen"].item() == 6
    assert second["seen"].item() >= 6
    assert first["mask"].isinf().sum() == second["mask"].isinf().sum() == 10


@at_servers(1)
def test_one_worker_in_odd_circumstances(rank, world_size):
    data = batches(0)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    # Optimizer state that was loaded before wrapping; weights written by load_state_dict are not stale.
    plain = build(0)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for batch in data[:3]:
        step(plain, plain_optimizer, batch)
    saved = copy.deepcopy((plain.state_dict(), plain_optimizer.state_dict()))
    strategy = psengine.AsyncServer(job="preloaded", staleness_scaling="inverse", delay_compensation=0.5)
    wrapped = psengine.DistributedDataParallel(build(1), strategy=strategy)
    inner = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    inner.load_state_dict(saved[1])
    optimizer = psengine.DistributedOptimizer(inner, wrapped)
    wrapped.module.load_state_dict(saved[0])
    for batch in data[3:6]:
        step(plain, plain_optimizer, batch)
        step(wrapped, optimizer, batch)
    assert_equal(state_of(wrapped.module), state_of(plain))

    # Another memory format after wrapping, and other memory.
    wrapped.module.to(memory_format=torch.channels_last)
    plain.to(memory_format=torch.channels_last)
    for parameter in wrapped.module.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.preserve_format)
    for batch in data[6:]:
        step(plain, plain_optimizer, batch)
        step(wrapped, optimizer, batch)
    for (name, ours), theirs in zip(wrapped.module.state_dict().items(), plain.state_dict().values(), strict=True):
        # Kernels for another layout add in another order.
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=name)

    with raises(ConfigurationError, "steps one optimizer", "parameter groups", "'sync-server'"):
        psengine.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1), wrapped)
    strategy.close()
    with raises(ReductionError, "serves no model"):
        optimizer.state_dict()
    assert strategy.completed_steps == len(data) - 3


class Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dropped: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class Dropping(nn.Module):
    """``dropped`` takes part, and its gradient is undefined."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.dropped = nn.Linear(2, 2), nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Drop.apply(self.kept(x), self.dropped)


@at_servers(1)
def test_an_undefined_gradient_does_not_decay_its_parameter(rank, world_size):
    for job, options in {
        "bare": {},
        "views": {"gradient_as_bucket_view": True},
        "finite": {"check_finite": True},
    }.items():
        torch.manual_seed(0)
        plain = Dropping()
        strategy = psengine.AsyncServer(job=f"undefined-{job}")
        wrapped = psengine.DistributedDataParallel(copy.deepcopy(plain), strategy=strategy, **options)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.1) for m in (plain, wrapped)]
        optimizers[1] = psengine.DistributedOptimizer(optimizers[1], wrapped)
        for _ in range(2):
            for model, optimizer in zip((plain, wrapped), optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        assert wrapped.module.dropped.grad is None
        assert_equal(state_of(wrapped.module), state_of(plain))
        wrapped.leave()
