"""Corners of the server strategies in which numbers could go wrong without a word."""

from __future__ import annotations

import copy
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.expectations import raises
from support.processes import run_ranks
from support.server_process import running_server
from support.server_training import assert_equal, batches, build, state_of, use
from torch import nn
from torch.nn import functional as F

import psengine
from psengine.errors import ConfigurationError, ReductionError, ServerLostError, ServerRefusedError


@pytest.fixture(scope="module")
def server():
    with running_server(shards=2) as running:
        yield running


class Branches(nn.Module):
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
    model = Branches()
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
    wrapped.strategy.close()
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


def one_worker(rank: int, world_size: int, address: str) -> None:
    use(address)
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

    with raises(ConfigurationError, "steps one optimizer", "parameter groups", "strategy='sync-server'"):
        psengine.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1), wrapped)
    strategy.close()
    with raises(ReductionError, "is not connected"):
        optimizer.state_dict()
    assert strategy.completed_steps == len(data) - 3


def test_one_worker_in_odd_circumstances(server):
    run_ranks(one_worker, 1, server.addresses[0], init_group=False)


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


def undefined_gradients(rank: int, world_size: int, address: str) -> None:
    use(address)
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
        wrapped.strategy.close()


def test_an_undefined_gradient_does_not_decay_its_parameter(server):
    run_ranks(undefined_gradients, 1, server.addresses[0], init_group=False)


def copies(rank: int, world_size: int, address: str) -> None:
    use(address)
    os.environ["PSENGINE_WORKER"] = "0"
    for strategy in (psengine.AsyncServer(job="copied"), psengine.SyncServer(job="averaged")):
        job = strategy._options["job"]
        wrapped = psengine.DistributedDataParallel(nn.Linear(2, 2), strategy=strategy)
        averaged = torch.optim.swa_utils.AveragedModel(wrapped)
        again = copy.deepcopy(averaged.module)
        assert [m.strategy.session.options.job for m in (wrapped, averaged.module, again)] == [
            job,
            f"{job}.1",
            f"{job}.2",
        ]
        # Two models that are both given the name are a mistake, after which the first still has it.
        with raises(ServerRefusedError, "duplicate_rank"):
            psengine.DistributedDataParallel(nn.Linear(2, 2), strategy=type(strategy)(job=job))
        averaged.module.strategy.close()
        third = copy.deepcopy(wrapped)
        assert third.strategy.session.options.job == f"{job}.1"
        for model in (wrapped, again, third):
            model.strategy.close()
        # As where a pickled model comes back in a later process.
        restored = copy.deepcopy(wrapped)
        assert restored.strategy.session.options.job == job
        restored.strategy.close()


def test_copies_of_a_model_whose_job_is_named_are_jobs_of_their_own(server):
    run_ranks(copies, 1, server.addresses[0], init_group=False)


def torchrun_variables(rank: int, world_size: int) -> dict[str, str]:
    # No MASTER_ADDR: those who meet at servers need none.
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}


def slurm_variables(rank: int, world_size: int) -> dict[str, str]:
    return {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(world_size),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


def open_mpi_variables(rank: int, world_size: int) -> dict[str, str]:
    """Of ranks on a host each."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return {f"OMPI_COMM_WORLD_{n}": str(v) for n, v in zip(names, (rank, world_size, 0, 1), strict=True)}


def launched_without_a_group(rank: int, world_size: int, address: str, launcher: Any) -> Any:
    os.environ.update(launcher(rank, world_size))
    with raises(ConfigurationError, "psengine.init()", "PSENGINE_SERVERS"):
        psengine.DistributedDataParallel(nn.Linear(2, 2), strategy="async")
    use(address)
    os.environ["PSENGINE_JOB"] = "launched"
    wrapped = psengine.DistributedDataParallel(nn.Linear(2, 2), strategy="async")
    second = psengine.DistributedDataParallel(nn.Linear(3, 2), strategy="async")
    found = wrapped.strategy.session.rank, wrapped.strategy.session.options.job, second.strategy.session.options.job
    wrapped.strategy.close()
    second.strategy.close()
    return found


@pytest.mark.parametrize("launcher", [torchrun_variables, slurm_variables, open_mpi_variables])
def test_ranks_of_a_launcher_without_a_group(server, launcher):
    results = run_ranks(launched_without_a_group, 2, server.addresses[0], launcher, init_group=False)
    assert results == [(0, "launched", "launched.1"), (1, "launched", "launched.1")]


def retried(rank: int, world_size: int, address: str) -> Any:
    # Long enough for a busy machine's two shards, and waited out once.
    strategy = psengine.AsyncServer(timeout_s=4.0)
    use("tcp://127.0.0.1:1")
    with raises(ServerLostError, "tcp://127.0.0.1:1"):
        psengine.DistributedDataParallel(nn.Linear(2, 2), strategy=strategy)
    use(address)
    os.environ["PSENGINE_JOB"] = "retried"
    wrapped = psengine.DistributedDataParallel(nn.Linear(2, 2), strategy=strategy)
    found = wrapped.strategy.session.rank, wrapped.strategy.session.options.job
    wrapped.strategy.close()
    return found


def test_a_strategy_whose_server_was_not_there_tries_again(server):
    assert run_ranks(retried, 1, server.addresses[0], init_group=False) == [(0, "retried")]


def configured_after_the_snapshot(rank: int, world_size: int, address: str, taken: Any, restarted: Any) -> None:
    use(address)
    wrapped = psengine.DistributedDataParallel(build(0), strategy=psengine.AsyncServer(timeout_s=30))
    wrapped.strategy.session.snapshot()
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9), wrapped)
    open(taken, "w").close()
    deadline_s = time.monotonic() + 30
    while not os.path.exists(restarted):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    plain = build(0)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for x, y in batches(0, 3):
        for model, own in ((wrapped, optimizer), (plain, plain_optimizer)):
            own.zero_grad()
            F.cross_entropy(model(x), y).backward()
            own.step()
    assert_equal(state_of(wrapped.module), state_of(plain))
    wrapped.strategy.close()


def test_a_snapshot_may_be_older_than_the_optimizer(tmp_path):
    taken, restarted = tmp_path / "taken", tmp_path / "restarted"
    options = {"snapshot_dir": str(tmp_path / "snapshots"), "snapshot_interval_s": 0}
    with running_server(**options) as server:
        address = server.addresses[0]
        with ThreadPoolExecutor(1) as pool:
            ranks = pool.submit(
                run_ranks, configured_after_the_snapshot, 1, address, str(taken), str(restarted), init_group=False
            )
            while not taken.exists() and not ranks.done():
                time.sleep(0.05)
            server.kill()
            with running_server(bind=address, **options):
                restarted.touch()
                ranks.result(timeout=60)
