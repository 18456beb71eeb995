"""What users of the server strategies rely on: state_dict, no_sync, unused parameters, joining late, clear errors."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import time
from typing import Any

import pytest
import torch
from support.expectations import raises
from support.marks import slow
from support.processes import run_ranks
from support.server_process import running_server
from support.server_training import assert_equal, batches, build, state_of, use
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional as F

import psengine
from psengine.errors import (
    ConfigurationError,
    ReductionError,
    ReplicaMismatchError,
    ServerLostError,
    ServerRefusedError,
)


@pytest.fixture(scope="module")
def server():
    with running_server(shards=2) as running:
        yield running


def wrap(strategy: psengine.Strategy, seed: int = 0, **options: Any) -> Any:
    return psengine.DistributedDataParallel(build(seed), strategy=strategy, **options)


def train(wrapped: Any, optimizer: torch.optim.Optimizer, data: Any) -> None:
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()


# ---- accumulation, unused parameters -------------------------------------------------------------------------------


def accumulate(rank: int, world_size: int, address: str, strategy_name: str) -> dict[str, torch.Tensor]:
    use(address)
    wrapped = wrap(_strategy(strategy_name, f"accumulate-{strategy_name}"))
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.05), wrapped)
    data = batches(0)
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        with wrapped.no_sync():
            F.cross_entropy(wrapped(first[0]), first[1]).backward()
        F.cross_entropy(wrapped(second[0]), second[1]).backward()
        optimizer.step()
    state = state_of(wrapped.module)
    wrapped.strategy.close()
    return state


def accumulate_plainly(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    model = build(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = batches(0)
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        for x, y in (first, second):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return state_of(model)


def _strategy(name: str, job: str) -> psengine.Strategy:
    if name == "sync-server":
        return psengine.SyncServer(job=job)
    return psengine.AsyncServer(push=name.partition(":")[2] or "step", job=job)


@pytest.mark.parametrize("name", ["sync-server", "async:step", "async:backward"])
def test_no_sync_accumulates(server, name):
    [ours] = run_ranks(accumulate, 1, server.addresses[0], name, init_group=False)
    [plain] = run_ranks(accumulate_plainly, 1, init_group=False)
    assert_equal(ours, plain)


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
            model, find_unused_parameters=True, strategy=_strategy(name, f"branches-{name}-{world_size}")
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
        wrapped.strategy.close()
    return state


def test_sync_server_knows_unused_parameters(server):
    ours = run_ranks(use_branches, 2, server.addresses[0], "sync-server", False)
    native = run_ranks(use_branches, 2, "", "", True)
    # Dividing by two before or after adding gives the same bits.
    assert_equal(ours[0], native[0])
    assert_equal(ours[1], native[0])


@pytest.mark.parametrize("name", ["async:step", "async:backward"])
def test_async_leaves_parameters_without_gradient_alone(server, name):
    [ours] = run_ranks(use_branches, 1, server.addresses[0], name, False, init_group=True)
    [native] = run_ranks(use_branches, 1, "", "", True)
    assert_equal(ours, native)


# ---- state_dict ----------------------------------------------------------------------------------------------------


def optimizer_for(parameters: Any, name: str) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(parameters, lr=0.01)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def save_and_load(rank: int, world_size: int, address: str, name: str, strategy_name: str) -> Any:
    """Train, save, train on; load the checkpoint in a new job, and train on alike."""
    use(address)
    data = batches(0)
    wrapped = wrap(_strategy(strategy_name, f"save-{name}-{strategy_name}"))
    optimizer = psengine.DistributedOptimizer(optimizer_for(wrapped.parameters(), name), wrapped)
    train(wrapped, optimizer, data[:5])
    checkpoint = copy.deepcopy({"model": wrapped.module.state_dict(), "optimizer": optimizer.state_dict()})
    train(wrapped, optimizer, data[5:])
    straight = state_of(wrapped.module)
    wrapped.strategy.close()

    wrapped = wrap(_strategy(strategy_name, f"load-{name}-{strategy_name}"), seed=7)
    optimizer = psengine.DistributedOptimizer(optimizer_for(wrapped.parameters(), name), wrapped)
    train(wrapped, optimizer, data[:1])
    wrapped.module.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))  # torch keeps its tensors, and steps them
    train(wrapped, optimizer, data[5:])
    resumed = state_of(wrapped.module)
    wrapped.strategy.close()

    plain = build(0)
    plain_optimizer = optimizer_for(plain.parameters(), name)
    train(plain, plain_optimizer, data[:5])
    return straight, resumed, checkpoint["optimizer"], plain_optimizer.state_dict()


@pytest.mark.parametrize(
    ("name", "strategy_name"),
    [
        *(("adam", "sync-server"), ("adam", "async:step"), ("momentum", "async:backward")),
        *(slow("momentum", "sync-server"), slow("momentum", "async:step"), slow("adam", "async:backward")),
    ],
)
def test_state_dicts_of_model_and_optimizer(server, name, strategy_name):
    [(straight, resumed, ours, plain)] = run_ranks(
        save_and_load, 1, server.addresses[0], name, strategy_name, init_group=False
    )
    assert_equal(resumed, straight)
    assert ours["param_groups"] == plain["param_groups"]
    assert ours["state"].keys() == plain["state"].keys()
    for index, state in plain["state"].items():
        assert ours["state"][index].keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(ours["state"][index][key]), torch.as_tensor(value)), (index, key)


# ---- workers without a process group -------------------------------------------------------------------------------


def own_job(rank: int, world_size: int, address: str, job: str, strategy: str) -> Any:
    """A worker of its own: no process group, no RANK; joined by PSENGINE_SERVERS alone."""
    use(address)
    os.environ["PSENGINE_JOB"] = job
    time.sleep(0.3 * rank)
    wrapped = psengine.DistributedDataParallel(build(seed=rank), strategy=strategy)
    start = state_of(wrapped.module)
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.01), wrapped)
    for batch in batches(rank):
        time.sleep(0.1)  # so that their lives overlap
        train(wrapped, optimizer, [batch])
    given_rank = wrapped.strategy.session.rank
    wrapped.strategy.close()
    return given_rank, start


def test_separate_jobs_meet_at_the_servers(server):
    results = run_ranks(own_job, 3, server.addresses[0], "separate", "async", init_group=False)
    assert sorted(rank for rank, _ in results) == [0, 1, 2]
    [status, *_] = server.job("separate")
    assert status["members"] == 0


def late_joiner(rank: int, world_size: int, address: str) -> Any:
    """Rank 1 comes when rank 0 has made some steps; both end with the same model and optimizer state."""
    use(address)
    os.environ["PSENGINE_JOB"] = "late"
    if rank == 1:
        time.sleep(1.0)
    wrapped = psengine.DistributedDataParallel(build(seed=rank), strategy="sync-server")
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9), wrapped)
    start = wrapped.strategy.completed_steps
    data = batches(rank)
    while wrapped.strategy.completed_steps < 120:
        train(wrapped, optimizer, data[:1])
        if rank == 0 and len(wrapped.strategy.members) < 2:
            time.sleep(0.05)
    state = state_of(wrapped.module)
    momenta = [s["momentum_buffer"].clone() for s in optimizer.state_dict()["state"].values()]
    wrapped.strategy.close()
    return start, state, momenta


def test_a_late_worker_gets_the_others_state(server):
    (first_start, first, first_momenta), (start, late, momenta) = run_ranks(
        late_joiner, 2, server.addresses[0], init_group=False
    )
    assert first_start == 0
    assert start > 0
    assert_equal(first, late)
    for a, b in zip(first_momenta, momenta, strict=True):
        assert torch.equal(a, b)


def embedded(rank: int, world_size: int) -> Any:
    os.environ.pop("PSENGINE_SERVERS", None)
    wrapped = psengine.DistributedDataParallel(build(seed=rank), strategy=psengine.AsyncServer())
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.01), wrapped)
    train(wrapped, optimizer, batches(rank))
    [status] = wrapped.strategy.session.status()
    process = wrapped.strategy._meeting.embedded
    wrapped.strategy.close()
    return status["jobs"]["default"]["applied"] > 0, process is not None


def test_without_servers_rank_zero_starts_one():
    assert run_ranks(embedded, 2) == [(True, True), (True, False)]


# ---- staleness -----------------------------------------------------------------------------------------------------


def slow_and_fast(rank: int, world_size: int, address: str, job: str, options: dict[str, Any]) -> Any:
    use(address)
    wrapped = wrap(psengine.AsyncServer(job=job, **options), seed=0)
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.01), wrapped)
    for batch in batches(rank, 8 if rank == 0 else 24):
        if rank == 0:
            time.sleep(0.1)
        train(wrapped, optimizer, [batch])
    status = wrapped.strategy.session.status()
    wrapped.strategy.close()
    return [shard["jobs"][job] for shard in status]


@pytest.mark.parametrize("bound", [slow(0), 2])
def test_staleness_is_bounded_behind_a_slow_worker(server, bound):
    job = f"bounded-{bound}"
    results = run_ranks(slow_and_fast, 2, server.addresses[0], job, {"max_staleness": bound})
    for shard in server.job(job):
        assert shard["max_lead"] <= bound
        # Between one's pull and push the other can make at most 2 s + 1 steps.
        assert shard["max_staleness"] <= 2 * bound + 1
    assert any(shard["applied"] for shard in results[0])


def test_unbounded_workers_run_ahead(server):
    run_ranks(slow_and_fast, 2, server.addresses[0], "unbounded", {})
    assert max(shard["max_staleness"] for shard in server.job("unbounded")) > 3


# ---- what goes wrong -----------------------------------------------------------------------------------------------


def misuse(rank: int, world_size: int, address: str) -> None:
    use(address)
    wrapped = wrap(psengine.AsyncServer(job="misuse"))
    with raises(ConfigurationError, "psengine.DistributedOptimizer"):
        F.cross_entropy(wrapped(batches(0)[0][0]), batches(0)[0][1]).backward()
    with raises(ConfigurationError, "LBFGS"):
        psengine.DistributedOptimizer(torch.optim.LBFGS(wrapped.parameters()), wrapped)
    with raises(ConfigurationError, "join is for strategies over collectives"):
        wrapped.join()
    with raises(ConfigurationError, "join is for strategies over collectives"):
        Join([wrapped])
    with raises(ConfigurationError, "takes no communication hook"):
        wrapped.register_comm_hook(None, _hook)
    with raises(ConfigurationError, "a strategy object serves one wrapped model"):
        wrap(wrapped.strategy)
    wrapped.strategy.close()
    wrapped.strategy.close()
    with raises(ReductionError, "is not connected"):
        wrapped.strategy.session  # noqa: B018

    with raises(ConfigurationError, "sparse gradients of 'weight'", "sparse=False"):
        psengine.DistributedDataParallel(nn.Embedding(5, 3, sparse=True), strategy=psengine.AsyncServer(job="sparse"))

    class Wrong(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, width)

    first = psengine.DistributedDataParallel(Wrong(3), strategy=psengine.AsyncServer(job="shapes"))
    with raises(ReplicaMismatchError, "'head.", "of shape (5", "of shape (3"):
        psengine.DistributedDataParallel(Wrong(5), strategy=psengine.AsyncServer(job="shapes"))
    with raises(ServerRefusedError, "another rule"):
        psengine.DistributedDataParallel(Wrong(3), strategy=psengine.AsyncServer(max_staleness=1, job="shapes"))
    psengine.DistributedOptimizer(torch.optim.SGD(first.parameters(), lr=0.1), first)
    second = psengine.DistributedDataParallel(Wrong(3), strategy=psengine.AsyncServer(job="shapes"))
    with raises(ServerRefusedError, "another optimizer"):
        psengine.DistributedOptimizer(torch.optim.Adam(second.parameters()), second)
    first.strategy.close()
    second.strategy.close()


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


class _FailsToLayOut(psengine.SyncServer):
    def lay_out(self, buckets: Any) -> None:
        self.close()
        raise MemoryError("sabotage of rank 0")


def abandoned(rank: int, world_size: int) -> str:
    os.environ.pop("PSENGINE_SERVERS", None)
    try:
        wrap(_FailsToLayOut() if rank == 0 else psengine.SyncServer())
    except (MemoryError, ServerLostError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_who_waits_at_an_embedded_server_that_is_gone_is_told():
    failed, told = run_ranks(abandoned, 2, deadline_s=60)
    assert failed == "MemoryError: sabotage of rank 0"
    assert re.search(r"ServerLostError: the embedded parameter server at ipc://.*rank 0", told)


def numbered(rank: int, world_size: int, address: str) -> list[str]:
    """Jobs of models that are wrapped in sequence, whether or not and when their wrappers are collected."""
    use(address)
    jobs = []
    for turn in range(4):
        wrapped = wrap(psengine.SyncServer())
        jobs.append(wrapped.strategy.session.job)
        strategy = wrapped.strategy
        del wrapped
        if turn != rank:
            gc.collect()
        if turn == 2:
            strategy.close()
    return jobs


def test_the_numbers_of_jobs_do_not_depend_on_garbage_collection(server):
    assert run_ranks(numbered, 2, server.addresses[0]) == [["default", "default.1", "default.2", "default.2"]] * 2


def _hook(state, bucket):
    raise AssertionError


def join_with_a_group(rank: int, world_size: int, address: str) -> None:
    """torch's ``Join`` does not ask the wrapper's ``join``."""
    use(address)
    wrapped = wrap(psengine.AsyncServer(job="join-async"))
    with raises(ConfigurationError, "join is for strategies over collectives"), Join([wrapped]):
        wrapped(batches(0)[0][0])  # a rank without data would have the servers apply zeros
    wrapped.strategy.close()
    wrapped = wrap(psengine.SyncServer(job="join-by-live-ranks"))
    with raises(ConfigurationError, "expected divide_by_initial_world_size=True, got False"):
        wrapped.join(divide_by_initial_world_size=False)
    with (
        raises(ConfigurationError, "expected divide_by_initial_world_size=True, got False"),
        Join([wrapped], divide_by_initial_world_size=False),
    ):
        wrapped(batches(0)[0][0])
    wrapped.strategy.close()


def test_join_over_servers_is_refused_where_zeros_would_count(server):
    run_ranks(join_with_a_group, 2, server.addresses[0])


def test_misuse_is_named(server):
    run_ranks(misuse, 1, server.addresses[0], init_group=False)


def changed_gradients(rank: int, world_size: int, address: str) -> None:
    use(address)
    wrapped = wrap(psengine.AsyncServer(push="backward", job="changed"))
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1), wrapped)
    x, y = batches(0)[0]
    F.cross_entropy(wrapped(x), y).backward()
    nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
    with raises(ReductionError, "push='step'"):
        optimizer.step()
    optimizer.zero_grad()
    F.cross_entropy(wrapped(x), y).backward()
    with raises(ReductionError, "before optimizer.step"):
        F.cross_entropy(wrapped(x), y).backward()
    wrapped.strategy.close()


def test_gradients_changed_after_they_left(server):
    run_ranks(changed_gradients, 1, server.addresses[0], init_group=False)


def step_hooks(rank: int, world_size: int, address: str) -> list[str]:
    use(address)
    wrapped = wrap(psengine.AsyncServer(job="hooks"))
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1), wrapped)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> torch.Tensor:
        seen.append("closure")
        optimizer.zero_grad()
        loss = F.cross_entropy(wrapped(batches(0)[0][0]), batches(0)[0][1])
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(4)]
    assert losses[-1] < losses[0]
    wrapped.strategy.close()
    return seen


def test_step_hooks_and_closures(server):
    [seen] = run_ranks(step_hooks, 1, server.addresses[0], init_group=False)
    assert seen == ["before", "closure", "after"] * 4


def poison(rank: int, world_size: int, address: str) -> Any:
    use(address)
    wrapped = wrap(psengine.AsyncServer(job="poison"))
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1), wrapped)
    before = {n: p.detach().clone() for n, p in wrapped.module.named_parameters()}
    x, y = batches(0)[0]
    (F.cross_entropy(wrapped(x), y) * float("nan")).backward()
    optimizer.step()
    after = {n: p.detach().clone() for n, p in wrapped.module.named_parameters()}
    refused = wrapped.strategy.refused_pushes
    workers = wrapped.strategy.session.status()[0]["jobs"]["poison"]["workers"]
    wrapped.strategy.close()
    return before, after, refused, sum(worker["refused"] for worker in workers)


def test_a_gradient_that_is_not_finite_changes_nothing(server):
    [(before, after, refused, counted)] = run_ranks(poison, 1, server.addresses[0], init_group=False)
    assert_equal(before, after)
    assert refused > 0
    assert counted > 0


def test_options_are_checked():
    for arguments, message in [
        ({"max_staleness": -1}, "max_staleness"),
        ({"max_staleness": True}, "max_staleness"),
        ({"staleness_scaling": "linear"}, "staleness_scaling"),
        ({"delay_compensation": float("nan")}, "delay_compensation"),
        ({"push": "later"}, "push"),
        ({"timeout_s": 0}, "timeout_s"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            psengine.AsyncServer(**arguments)
    with pytest.raises(ConfigurationError, match="quorum"):
        psengine.SyncServer(quorum=0)


def test_strategies_travel_as_their_options():
    strategy = psengine.AsyncServer(max_staleness=3, push="backward", job="x")
    clone = pickle.loads(pickle.dumps(strategy))
    assert repr(clone) == repr(strategy)
    assert clone.rule == strategy.rule
    assert pickle.loads(pickle.dumps(psengine.SyncServer(quorum=2))).rule == {"name": "average", "quorum": 2}
