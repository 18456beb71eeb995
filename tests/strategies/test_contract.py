"""The contract of the strategy interface, parametrized over every strategy that gives native DDP's semantics."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from support import trial_codecs
from support.processes import run_ranks
from support.server_process import running_server

from psengine.collectives.c10d import C10dCollective
from psengine.errors import ConfigurationError, ReductionError, ReplicaMismatchError
from psengine.strategies.base import Replica, Strategy
from psengine.strategies.registry import STRATEGIES, resolve_strategy
from psengine.strategies.sync_all_reduce import SyncAllReduce
from psengine.tensors.bucket import Bucket

# Strategies that give native DDP's semantics, and how far their averages may be from the mean: without a codec one
# rounding for each product and each sum.
SYNCHRONOUS = {
    "sync": 1e-6,
    "sync-server": 1e-6,
    "sync:compress=bf16": 3e-2,
    "sync:compress=int8": 5e-2,
    "sync-server:compress=fp16": 4e-3,
    "sync-server:compress=int8": 5e-2,
}


@pytest.fixture(scope="module")
def servers():
    """What PSENGINE_SERVERS is in ranks, for strategies that need it."""
    with running_server(sabotage=trial_codecs.register) as server:
        yield server.addresses[0]


def make_replica(parameters: dict[str, torch.nn.Parameter]) -> Replica:
    return Replica(
        parameters=parameters,
        buffers=dict,
        state={name: p.detach() for name, p in parameters.items()},
        collective=C10dCollective(),
        device=torch.device("cpu"),
    )


def make_buckets(strategy: Strategy, parameters: dict[str, torch.nn.Parameter]) -> list[Bucket]:
    names, tensors = list(parameters), list(parameters.values())
    plans = [(2, 1), (0,)]
    return [Bucket(i, plan, tensors, names, sparse=False, allocate=strategy.allocate) for i, plan in enumerate(plans)]


def synchronous_contract(rank: int, world_size: int, name: str, servers: str) -> dict[str, Any]:
    os.environ |= {"PSENGINE_SERVERS": servers, "PSENGINE_JOB": f"{name}, {world_size} workers"}
    trial_codecs.register()
    strategy = resolve_strategy(name)
    generator = torch.Generator().manual_seed(rank)
    shapes = {"weight": (50, 3), "bias": (3,), "scale": ()}
    parameters = {k: torch.nn.Parameter(torch.randn(s, generator=generator)) for k, s in shapes.items()}
    strategy.prepare(make_replica(parameters), synchronize=True)
    buckets = make_buckets(strategy, parameters)
    strategy.lay_out(buckets)
    start = {k: p.detach().clone() for k, p in parameters.items()}
    gradients = []
    for _ in range(3):  # the same buckets serve every step
        for p in parameters.values():
            p.grad = torch.randn(p.shape, generator=generator)
        gradients.append({k: p.grad.clone() for k, p in parameters.items()})
        share = strategy.begin(world_size)
        reductions = []
        for bucket in buckets:
            bucket.pack([p.grad for p in bucket.parameters], share)
            reductions.append(strategy.reduce(bucket))
        usage = torch.tensor([1, 0, rank], dtype=torch.int32)
        usage_work = strategy.reduce_usage(usage)
        remainder = strategy.finish()
        for bucket, reduction in zip(buckets, reductions, strict=True):
            result = reduction.wait()
            if result is not None:
                bucket.unpack([p.grad for p in bucket.parameters], result)
        usage_work.wait()
        remainder.wait()
        assert not any(reduction.is_superseded for reduction in reductions)
        assert strategy.step(lambda: "stepped") == "stepped"
    received = [torch.full((2,), float(rank)), torch.full((1,), rank)]
    strategy.broadcast(received, source_rank=world_size - 1)
    averaged = {k: p.grad.clone() for k, p in parameters.items()}
    with pytest.raises(ConfigurationError, match="serves one wrapped model"):
        strategy.prepare(make_replica(parameters), synchronize=False)
    strategy.close()
    strategy.close()
    strategy.prepare(make_replica(parameters), synchronize=False)
    strategy.lay_out(buckets)
    strategy.close()
    if strategy.capabilities.carries_buffers:
        received = []  # nothing is broadcast: buffers travel with the gradients
    return {"start": start, "sent": gradients[-1], "averaged": averaged, "usage": usage, "received": received}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_synchronous_contract(name, world_size, servers):
    results = run_ranks(synchronous_contract, world_size, name, servers)
    for result in results:
        for key, start in result["start"].items():
            assert torch.equal(start, results[0]["start"][key]), "replicas start equal"
            mean = torch.stack([r["sent"][key].double() for r in results]).mean(0)
            assert torch.equal(result["averaged"][key], results[0]["averaged"][key]), "replicas agree to the bit"
            assert torch.allclose(result["averaged"][key].double(), mean, rtol=0, atol=SYNCHRONOUS[name])
        assert result["usage"].tolist() == [world_size, 0, sum(range(world_size))]
        expected = [] if name.startswith("sync-server") else [[world_size - 1.0] * 2, [world_size - 1]]
        assert [t.tolist() for t in result["received"]] == expected


def different_models(rank: int, world_size: int, name: str, difference: str) -> str:
    shape, dtype, extra = (4, 3), torch.float32, {}
    if rank == 1:
        shape = {"shape": (4, 5), "stride": (4, 3)}.get(difference, shape)
        dtype = torch.float64 if difference == "dtype" else dtype
        extra = {"head.bias": torch.nn.Parameter(torch.zeros(2))} if difference == "count" else {}
    weight = torch.zeros(shape, dtype=dtype)
    if rank == 1 and difference == "stride":
        weight = torch.zeros(3, 4).t()
    parameters = {"body.bias": torch.nn.Parameter(torch.zeros(2)), "body.weight": torch.nn.Parameter(weight), **extra}
    try:
        resolve_strategy(name).prepare(make_replica(parameters), synchronize=True)
    except ReplicaMismatchError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("difference", "texts"),
    [
        ("shape", ["[1]: params[1] ('body.weight')", "sizes [4, 5] appears not to match sizes", "rank 0", "[4, 3]"]),
        ("stride", ["'body.weight'", "strides [1, 4] appears not to match strides", "[3, 1]"]),
        ("dtype", ["'body.weight'", "dtype torch.float64", "torch.float32"]),
        ("count", ["Rank 0 has 2 params, while rank 1 has inconsistent 3 params", "head.bias"]),
    ],
)
@pytest.mark.parametrize("name", ["sync"])
def test_every_rank_learns_how_models_differ(name, difference, texts):
    for rank, message in enumerate(run_ranks(different_models, 2, name, difference)):
        for text in [*texts, f"seen on rank {rank}"]:
            assert text in message


def test_registry():
    assert {name.partition(":")[0] for name in SYNCHRONOUS} <= set(STRATEGIES)
    own = SyncAllReduce()
    assert resolve_strategy(own) is own
    assert isinstance(resolve_strategy("sync"), SyncAllReduce)


def different_codecs(rank: int, world_size: int) -> str:
    parameters = {"weight": torch.nn.Parameter(torch.zeros(3))}
    strategy = resolve_strategy(f"sync:compress={'bf16' if rank == 1 else 'none'}")
    try:
        strategy.prepare(make_replica(parameters), synchronize=True)
    except ReplicaMismatchError as error:
        return str(error)
    return "accepted"


def test_every_rank_learns_that_codecs_differ():
    for rank, message in enumerate(run_ranks(different_codecs, 2)):
        assert (
            f"expected compress=none of rank 0 on every rank, got, by rank, none, bf16; seen on rank {rank}" in message
        )


@pytest.mark.parametrize(
    ("specification", "message"),
    [
        ("asinc", r"got 'asinc'\)\. Did you mean async\?"),
        ("gossip", r"unknown strategy \(expected one of \[.*'sync'.*\], got 'gossip'\)"),
        (
            "sync:quorum=3",
            r"unknown option 'quorum' \(expected some of \['compress', 'dtype'\] of strategy 'sync', got quorum=3\)",
        ),
        (3, r"got 3\)"),
        (SyncAllReduce, "call it to make an object"),
        ("", r"got ''"),
    ],
)
def test_bad_specifications(specification, message):
    with pytest.raises(ConfigurationError, match=message):
        resolve_strategy(specification)


def test_unprepared_strategy_says_so():
    with pytest.raises(ReductionError, match="was not prepared"):
        SyncAllReduce().collective  # noqa: B018
