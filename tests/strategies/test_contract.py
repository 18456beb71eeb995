"""The contract of strategies, parametrized over every strategy: one line of registration puts a new one under it."""

import copy
import os
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from oracles.averages import whole
from oracles.rules import rule_of
from support import top_one_codec
from support.expectations import raises
from support.marks import slow
from support.processes import in_ranks, run_ranks
from support.server_process import running_server

import psengine
from psengine.collectives.c10d import C10dCollective
from psengine.errors import ConfigurationError, ReplicaMismatchError
from psengine.strategies.base import Strategy
from psengine.strategies.exchange import Driver, Step
from psengine.strategies.life_cycle import Replica
from psengine.strategies.registry import STRATEGIES, resolve_strategy
from psengine.strategies.sync_all_reduce import SyncAllReduce
from psengine.tensors.bucket import Bucket


@pytest.fixture(autouse=True)
def one_thread():
    """As in the ranks: with another number of threads a product of matrices may have other bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# A multiple of four, after which replicas that average every four steps are equal.
STEPS = 12


def make_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 300), torch.nn.Tanh(), torch.nn.Linear(300, 100), torch.nn.Linear(100, 2)
    )


def make_optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def train_plainly(rule_name: str, world_size: int) -> list[torch.Tensor]:
    """The parameters of replica 0 after the last step, where one process has all replicas and follows the rule."""
    replicas = [make_model(0) for _ in range(world_size)]
    optimizers = [make_optimizer(replica.parameters()) for replica in replicas]
    layout = [whole([name], replicas[0]) for name, _ in replicas[0].named_parameters()]
    rule = rule_of(rule_name, replicas, lambda: layout)
    for step in range(STEPS):
        rule.before_forward()
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            optimizer.zero_grad()
            replica(batch_of(rank, step)).square().mean().backward()
        rule.before_step()
        for optimizer in optimizers:
            optimizer.step()
        rule.after_step()
    return [parameter.detach() for parameter in replicas[0].parameters()]


# The strategies that the contract holds, each with the rule that it follows, to the bit, with so many workers.
ORACLES: dict[str, tuple[str, list[int]]] = {
    "sync": ("sync", [1, 2]),
    "sync-server": ("sync", [1, 2]),
    "sync:shard_optimizer=true": ("sync", [1, 2]),
    "async": ("async", [1]),
    "local:every=4": ("local:every=4", [1, 2]),
    "diloco:every=4": ("diloco:every=4", [1, 2]),
    "diloco-server:every=4": ("diloco:every=4", [1, 2]),
}
top_one_codec.register()
# How far averages may be from the mean: without a codec one rounding for each product and each sum.
TOLERANCES = {
    **dict.fromkeys(ORACLES, 1e-6),
    "sync:compress=bf16": 3e-2,
    "sync:compress=int8": 5e-2,
    "sync-server:compress=fp16": 4e-3,
    "sync-server:compress=int8": 5e-2,
}
# Of codecs with error feedback one step may be far away: that replicas agree counts.
CODECS = ["int8", "fp4", "onebit", "topk:ratio=0.1"]
CODED = [f"{name}:compress={codec.replace(':', ',')}" for name in ("sync", "sync-server", "async") for codec in CODECS]
STRATEGIES_AND_WORKERS = [(name, workers) for name, (_, sizes) in ORACLES.items() for workers in sizes]


@pytest.fixture(scope="module")
def server():
    with running_server(sabotage=top_one_codec.register) as running:
        yield running


@pytest.fixture
def servers(server, request) -> dict[str, str]:
    """What ranks have in their environment, for strategies that need servers: a job for each test."""
    job = "".join(character if character.isalnum() else "-" for character in request.node.name)
    return {"PSENGINE_SERVERS": server.addresses[0], "PSENGINE_JOB": job}


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


def service(rank: int, world_size: int, name: str, servers: dict[str, str]) -> dict[str, Any]:
    os.environ.update(servers)
    strategy = resolve_strategy(name)
    generator = torch.Generator().manual_seed(rank)
    shapes = {"weight": (50, 3), "bias": (3,), "scale": ()}
    parameters = {k: torch.nn.Parameter(torch.randn(s, generator=generator)) for k, s in shapes.items()}
    strategy.prepare(make_replica(parameters))
    buckets = make_buckets(strategy, parameters)
    strategy.lay_out(buckets)
    strategy.join()
    start = {k: p.detach().clone() for k, p in parameters.items()}
    strategy.bind(torch.optim.SGD(parameters.values(), lr=0.0))
    results = []
    for _ in range(3):  # the same buckets serve every step
        for p in parameters.values():
            p.grad = torch.randn(p.shape, generator=generator)
        gradients = {k: p.grad.clone() for k, p in parameters.items()}
        share = strategy.begin(Step(live_world_size=world_size))
        driver = Driver(strategy.exchange)
        for bucket in buckets:
            bucket.pack([p.grad for p in bucket.parameters], share)
            driver.begin(bucket)
        usage = torch.tensor([1, 0, rank], dtype=torch.int32)
        usage_work = strategy.reduce_usage(usage)
        remainder = strategy.finish()
        results = [driver.result(bucket) for bucket in buckets]
        for bucket, result in zip(buckets, results, strict=True):
            if result is not None:
                bucket.unpack([p.grad for p in bucket.parameters], result)
        usage_work.wait()
        remainder.wait()
        assert strategy.step(lambda: "stepped", lambda: "stepped") == "stepped"
    is_averaged = results[0] is not None
    state = strategy.state_dict()
    strategy.load_state_dict(state)
    torch.testing.assert_close(strategy.state_dict(), state, rtol=0, atol=0)
    with pytest.raises(ConfigurationError, match="serves one wrapped model"):
        strategy.prepare(make_replica(parameters))
    strategy.close()
    strategy.close()
    strategy.prepare(make_replica(parameters))
    strategy.lay_out(buckets)
    strategy.join()
    strategy.close()
    left = {k: torch.zeros_like(p) if p.grad is None else p.grad.clone() for k, p in parameters.items()}
    return {"start": start, "sent": gradients, "left": left, "usage": usage.tolist(), "is_averaged": is_averaged}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", [*TOLERANCES, *(slow(name) for name in CODED)])
def test_a_replica_in_service(name, world_size, servers):
    results = run_ranks(service, world_size, name, servers)
    for rank, result in enumerate(results):
        for key, start in result["start"].items():
            assert torch.equal(start, results[0]["start"][key]), "replicas start equal"
            if not result["is_averaged"]:
                assert torch.equal(result["left"][key], result["sent"][key]), "gradients stay this replica's"
                continue
            mean = torch.stack([r["sent"][key].double() for r in results]).mean(0)
            assert torch.equal(result["left"][key], results[0]["left"][key]), "replicas agree to the bit"
            assert torch.allclose(result["left"][key].double(), mean, rtol=0, atol=TOLERANCES.get(name, 10.0))
        used = [world_size, 0, sum(range(world_size))] if result["is_averaged"] else [1, 0, rank]
        assert result["usage"] == used


def train(
    rank: int,
    world_size: int,
    name: str,
    servers: dict[str, str],
    options: dict[str, Any],
    steps: range,
    checkpoint: Any,
) -> tuple[list[torch.Tensor], Any]:
    os.environ.update(servers)
    model = psengine.DistributedDataParallel(make_model(rank if steps.start == 0 else 99), strategy=name, **options)
    model.saves_strategy_state = True
    optimizer = psengine.DistributedOptimizer(make_optimizer(model.parameters()), model)
    if checkpoint is not None:
        model.load_state_dict(checkpoint[rank]["model"])
        optimizer.load_state_dict(checkpoint[rank]["optimizer"])
    for step in steps:
        optimizer.zero_grad()
        model(batch_of(rank, step)).square().mean().backward()
        optimizer.step()
    saved = {"model": copy.deepcopy(model.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict())}
    parameters = [parameter.detach().clone() for parameter in model.module.parameters()]
    model.leave()
    return parameters, saved


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize(("name", "world_size"), STRATEGIES_AND_WORKERS)
def test_training_equals_the_oracle_also_from_a_checkpoint(name, world_size, options, servers):
    first = run_ranks(train, world_size, name, servers, options, range(6), None)
    servers["PSENGINE_JOB"] += "-again"
    checkpoint = [saved for _, saved in first]
    for parameters, _ in run_ranks(train, world_size, name, servers, options, range(6, STEPS), checkpoint):
        for parameter, wanted in zip(parameters, train_plainly(ORACLES[name][0], world_size), strict=True):
            assert torch.equal(parameter, wanted)


@pytest.mark.parametrize(("strategy", "world_size"), [("sync", 2), ("sync-server", 2), ("async", 1)])
def test_residuals_are_part_of_a_checkpoint(strategy, world_size, servers):
    name, job = f"{strategy}:compress=top1", servers["PSENGINE_JOB"]
    straight = run_ranks(train, world_size, name, servers, {}, range(STEPS), None)
    servers["PSENGINE_JOB"] = f"{job}-first"
    checkpoint = [saved for _, saved in run_ranks(train, world_size, name, servers, {}, range(6), None)]
    assert all(saved["model"]["_psengine_strategy"]["state"] for saved in checkpoint)
    servers["PSENGINE_JOB"] = f"{job}-again"
    resumed = run_ranks(train, world_size, name, servers, {}, range(6, STEPS), checkpoint)
    for (parameters, _), (wanted, _) in zip(resumed, straight, strict=True):
        assert all(map(torch.equal, parameters, wanted))


DIFFERENCES = {
    "shape": ["[1]: params[1] ('body.weight')", "sizes [4, 5] appears not to match sizes", "rank 0", "[4, 3]"],
    "stride": ["'body.weight'", "strides [1, 4] appears not to match strides", "[3, 1]"],
    "dtype": ["'body.weight'", "dtype torch.float64", "torch.float32"],
    "count": ["Rank 0 has 2 params, while rank 1 has inconsistent 3 params", "head.bias"],
    "names": ["expected 'body.bias' of rank 0 at params[0], got 'body.scale' on rank 1", "a set has none"],
    "codec": ["expected compress=none of rank 0 on every rank, got, by rank, compress=none; compress=bf16"],
    "strategy": ["expected strategy=sync", "of rank 0 on every rank, got, by rank, strategy=sync", "; strategy="],
}


@in_ranks(2)
def test_every_rank_learns_how_models_and_codecs_differ(rank, world_size):
    for difference, texts in DIFFERENCES.items():
        shape, dtype, extra = (4, 3), torch.float32, {}
        if rank == 1:
            shape = (4, 5) if difference == "shape" else shape
            dtype = torch.float64 if difference == "dtype" else dtype
            extra = {"head.bias": torch.nn.Parameter(torch.zeros(2))} if difference == "count" else {}
        weight = torch.zeros(shape, dtype=dtype)
        if rank == 1 and difference == "stride":
            weight = torch.zeros(3, 4).t()
        bias = "body.scale" if rank == 1 and difference == "names" else "body.bias"
        parameters = {bias: torch.nn.Parameter(torch.zeros(2)), "body.weight": torch.nn.Parameter(weight)}
        others = {"codec": ["sync:compress=bf16"], "strategy": ["local:every=4", "sync-server"]}
        others |= {"names": [name for name in ORACLES if not name.startswith("sync:") and name != "sync"]}
        for other in others.get(difference, ["sync"]):
            with raises(ReplicaMismatchError, *texts, f"seen on rank {rank}"):
                own = other if rank or difference == "names" else "sync"
                resolve_strategy(own).prepare(make_replica({**parameters, **extra}))


def test_registry():
    assert {name.partition(":")[0] for name in ORACLES} == set(STRATEGIES), "the contract holds every strategy"
    own = SyncAllReduce()
    assert resolve_strategy(own) is own
    assert isinstance(resolve_strategy("sync"), SyncAllReduce)


@in_ranks(2)
def test_a_models_state_has_native_ddps_keys_unless_asked_for_more(rank, world_size):
    model = psengine.DistributedDataParallel(make_model(0), strategy="local:every=4")
    native = torch.nn.parallel.DistributedDataParallel(make_model(0))
    assert list(model.state_dict()) == list(native.state_dict())
    plain = model.state_dict()
    model.saves_strategy_state = True
    assert set(model.state_dict()) - set(plain) == {"_psengine_strategy"}
    with pytest.raises(RuntimeError, match=r"Missing key.*_psengine_strategy"):
        model.load_state_dict(plain)
    model.load_state_dict(plain, strict=False)
    other = psengine.DistributedDataParallel(make_model(0), strategy="sync")
    with pytest.raises(ConfigurationError, match=r"expected 'sync', got 'local'"):
        other.load_state_dict(model.state_dict())


def test_an_unknown_strategy_of_the_environment_says_where_it_comes_from(monkeypatch):
    monkeypatch.setenv("PSENGINE_STRATEGY", "asink:max_staleness=4")
    with raises(
        ConfigurationError,
        "PSENGINE_STRATEGY=asink:max_staleness=4, which psengine run --strategy sets: unknown strategy",
        "Did you mean async?",
    ):
        psengine.DistributedDataParallel(torch.nn.Linear(2, 1))
