"""Workers and servers killed, stopped and restarted by real signals, while others train; oracles say what is left.

A step of "sync-server" is checked gradient by gradient: each average must be, to the bit, the mean over a set of
workers that the test allows, of what they compute from the weights that all the averages before lead to.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks.kill_loop import LEASE_S, Servers, last_step
from support.fault_workers import Reports, Worker, expect_workers, results_of, worker_processes
from support.marks import slow
from support.processes import run_ranks
from support.server_process import Peer, ServerProcess, running_server
from support.server_training import assert_equal, state_of
from support.shard_world import APPLY, SGD, spec
from support.waiting import eventually
from support.worker_sessions import entered
from torch import nn
from torch.nn import functional as F

import psengine
from psengine.errors import ServerRefusedError

# What a busy machine may add to a lease, and what a rejoining worker may take there: an operation's timeout is 40 s.
GRACE_S = 8.0
REJOIN_S = 15.0
FEATURES = 6
# Until the test says how long: see end_soon.
ENDLESS = 1_000_000

State = dict[str, torch.Tensor]


class Model(nn.Module):
    """Small; buffers; each parameter a chunk of its own, over all shards."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.normalise = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(self.normalise(self.first(x))))


def build(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100_000 * (rank + 1) + step)
    return torch.randn(5, FEATURES, generator=generator), torch.randint(0, 3, (5,), generator=generator)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def momenta_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    states = optimizer.state_dict()["state"]
    return {f"momentum of {n}": states[i]["momentum_buffer"] for i, (n, _) in enumerate(model.named_parameters())}


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with running_server(shards=2, lease_s=LEASE_S) as running:
        yield running


def begin(kind: Callable[..., Any], address: str, world_size: int, options: Any, **wrapping: Any) -> tuple[Any, ...]:
    """This worker's rank, and its model's strategy, wrapper and optimizer."""
    rank = int(os.environ["PSENGINE_WORKER"])
    expect_workers(world_size)
    strategy = kind(servers=address, **{"timeout_s": 40.0, **(options or {})})
    wrapped = psengine.DistributedDataParallel(build(rank), strategy=strategy, bucket_cap_mb=0.00001, **wrapping)
    return rank, strategy, wrapped, psengine.DistributedOptimizer(make_optimizer(wrapped.parameters()), wrapped)


def train_sync(
    reports: Reports,
    address: str,
    steps: int,
    world_size: int = 1,
    pause_s: float = 0.0,
    options: dict[str, Any] | None = None,
    **wrapping: Any,
) -> Any:
    """Train until the model has seen ``steps`` steps.

    Returns {step: averages}, the state, and the momenta.
    """
    rank, strategy, wrapped, optimizer = begin(psengine.SyncServer, address, world_size, options, **wrapping)
    reports.say("entered", strategy.completed_steps)
    averages: dict[int, State] = {}
    while strategy.completed_steps < (steps := told_steps(reports, strategy.completed_steps) or steps):
        x, y = batch(rank, strategy.completed_steps)
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        step = strategy.completed_steps
        averages[step] = {name: p.grad.clone() for name, p in wrapped.module.named_parameters()}
        nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)
        optimizer.step()
        reports.say("step", step)
        time.sleep(pause_s)
    result = averages, state_of(wrapped.module), momenta_of(wrapped.module, optimizer)
    strategy.close()
    return result


def told_steps(reports: Reports, completed: int) -> Any:
    """The number of steps that the test tells, which may hold this worker first; None while it says nothing."""
    told = reports.told()
    if told == "hold":
        reports.say("held", completed)
        told = reports.await_go()
    return told


def replay(rank: int, _: int, ranks: Sequence[int], result: bytes) -> list[tuple[int, ...]]:
    """Of each step the workers whose mean its averages are, to the bit, the same in every chunk."""
    averages, final, momenta = pickle.loads(result)
    model = build(seed=0)
    optimizer = make_optimizer(model.parameters())
    sets = [some for size in range(len(ranks), 0, -1) for some in itertools.combinations(ranks, size)]
    found = []
    for step in range(1, max(averages) + 1):
        gradients, buffers = {}, {}
        before = state_of(model)
        for worker in ranks:
            model.load_state_dict(before)
            optimizer.zero_grad()
            x, y = batch(worker, step - 1)
            F.cross_entropy(model(x), y).backward()
            gradients[worker] = {name: p.grad.clone() for name, p in model.named_parameters()}
            buffers[worker] = {name: b.clone() for name, b in model.named_buffers()}

        def is_mean(some: Sequence[int], gradients: Any = gradients, average: State = averages[step]) -> bool:
            """Added in the order of ranks."""
            sums = {name: sum([gradients[one][name] for one in some[1:]], gradients[some[0]][name]) for name in average}
            return all(torch.equal(sums[name] / len(some), average[name]) for name in average)

        matching = [some for some in sets if is_mean(some)]
        assert matching, f"step {step} is the mean over no set of workers"
        found.append(matching[0])
        model.load_state_dict({**before, **buffers[ranks[0]]})
        for name, parameter in model.named_parameters():
            parameter.grad = averages[step][name].clone()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    assert_equal(state_of(model), final)
    assert_equal(momenta_of(model, optimizer), momenta)
    return found


def phases_of(result: Any, ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Replay a survivor's whole run, in a process that has one thread; the lowest rank stays, and gives the buffers."""
    # Pickled here: multiprocessing would send a descriptor for each tensor.
    return run_ranks(replay, 1, ranks, pickle.dumps(result), init_group=False)[0]


def assert_same_end(results: Sequence[Any]) -> None:
    for _, state, momenta in results[1:]:
        assert_equal(results[0][1], state)
        assert_equal(results[0][2], momenta)
    for (averages, _, _), step in itertools.product(results, results[0][0]):
        if step in averages:
            assert_equal(averages[step], results[0][0][step])


def end_soon(workers: Sequence[Worker]) -> list[Any]:
    """Let workers of one job train some steps more; their results.

    While the first is held no other is more than a step ahead: all are told before any gets there.
    """
    first, *others = workers
    first.go("hold")
    last = first.wait_for("held")[0] + 8
    for worker in (*others, first):
        worker.go(last)
    return results_of(workers)


def assert_goes_on(survivors: Sequence[Worker], died_s: float) -> None:
    """No survivor goes longer without a step than a lease and GRACE_S."""
    for survivor in survivors:
        reached = last_step(survivor)
        # Two steps on: the first of them may have been all but done.
        _, done_s = survivor.wait_for("step", at_least=reached + 2)
        assert done_s - died_s < LEASE_S + GRACE_S


@pytest.mark.parametrize("waits_for_eviction", [False, slow(True)])
def test_a_restarted_worker_gets_weights_buffers_and_momenta(server, waits_for_eviction):
    arguments = (train_sync, server.addresses[0], ENDLESS, 2, 0.01)
    with worker_processes() as workers:
        survivor = workers.start(*arguments, rank=0)
        first_life = workers.start(*arguments, rank=1)
        first_life.wait_for("step", at_least=10)
        first_life.kill()
        died_s = time.monotonic()
        if waits_for_eviction:
            assert_goes_on([survivor], died_s)
        begun_s = time.monotonic()
        second_life = workers.start(*arguments, rank=1)
        entered, entered_s = second_life.wait_for("entered")
        assert entered >= 10
        assert entered_s - begun_s < REJOIN_S
        results = end_soon([survivor, second_life])
    assert_same_end(results)
    phases = phases_of(results[0], (0, 1))
    assert phases[0] == phases[-1] == (0, 1)
    alone = [i for i, ranks in enumerate(phases) if ranks == (0,)]
    assert not alone or alone == list(range(alone[0], alone[-1] + 1))


@pytest.mark.parametrize("tier", ["memory", slow("snapshot"), "log"])
def test_sync_server_equals_the_undisturbed_run_where_servers_are_killed(tmp_path, tier):
    chooser = random.Random(tier)
    with ExitStack() as context:
        kept = {"snapshot_interval_s": 0.3, "durability": tier}
        options = [{} if tier == "memory" else kept | {"snapshot_dir": tmp_path / f"kept-{n}"} for n in range(2)]
        servers = Servers(context, options.__getitem__)
        workers = context.enter_context(worker_processes())
        train = functools.partial(train_sync, gradient_as_bucket_view=tier != "memory")
        members = [workers.start(train, ",".join(servers.addresses), ENDLESS, 3, 0.005, rank=rank) for rank in range(3)]
        for number, index in enumerate((0, 1, 0)):
            members[number].wait_for("step", at_least=8 * (number + 1))
            time.sleep(chooser.random() * 0.02)
            servers.kill(index)
        results = end_soon(members)
    assert_same_end(results)
    assert set(phases_of(results[0], (0, 1, 2))) == {(0, 1, 2)}


TIERS = ({"durability": "log"}, {"durability": "log+replica", "election": "launcher={}/elector"})


@pytest.mark.parametrize("tier", TIERS)
def test_a_server_with_an_older_state_than_was_acknowledged_serves_nobody(tmp_path: Path, tier: dict[str, str]):
    """It was started again with a copy from before: its workers know better."""
    options = {name: value.format(tmp_path) for name, value in tier.items()}
    options |= {"bind": f"ipc://{tmp_path}/socket", "lease_s": LEASE_S}
    with ExitStack() as context:
        server = context.enter_context(running_server(snapshot_dir=tmp_path / "kept", **options))
        session = entered(server.addresses[0], 0, [spec(0)], rule=APPLY)
        context.callback(session.close)
        session.configure(0, {"optimizer": "SGD", "groups": [{**SGD, "lr": 1.0}], "runs": [[0, 4, 0]]}).wait()
        for number in range(4):
            session.push(0, torch.ones(4), []).wait()
            if number == 1:
                shutil.copytree(tmp_path / "kept", tmp_path / "old")
        server.kill()
        server = context.enter_context(running_server(snapshot_dir=tmp_path / "old", **options))
        refusal = r"older state, version 2, and workers knew of version 4[\s\S]*--snapshot-dir of before"
        with pytest.raises(ServerRefusedError, match=refusal) as caught:
            session.push(0, torch.ones(4), []).wait()
        assert caught.value.code == "state_lost"
        with Peer(server.addresses[0]) as peer:
            assert peer.hello().body["code"] == "state_lost"
        server.kill()
        server = context.enter_context(running_server(snapshot_dir=tmp_path / "kept", **options))
        eventually(lambda: server.job("job"), "it leads")
        with Peer(server.addresses[0]) as peer:
            assert peer.hello(rank=1, world_size=2).type.name == "WELCOME"
            assert server.job("job")[0]["version_min"] == 4
