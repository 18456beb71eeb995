"""Strategies that compute something else than native DDP have the bits of their rule (tests/oracles), on every rank.

Each rank also holds all replicas, and follows the rule with them: products of matrices then have the same kernels.
"""

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracles.averages import Part, whole
from oracles.models import MODELS, Model
from oracles.rules import rule_of
from support.processes import run_ranks

import psengine
from psengine.specification import Specification
from psengine.strategies.registry import resolve_strategy
from psengine.strategies.servers.base import ServerStrategy
from psengine.verify.differences import Tolerance, find_difference

STEPS = 4
CODECS = ("bf16", "fp16", "int8", "int8,error_feedback=false", "fp4", "onebit", "topk,ratio=0.2")
# Each with the models that the quick suite trains; the slow one trains all. Server strategies refuse sparse gradients.
QUICK = {
    "sync:compress=bf16": ["mixed", "shapes"],
    "sync:compress=fp16": ["unused"],
    "sync:compress=int8": ["batch norm", "own buffers", "unused", "sparse", "shapes"],
    "sync:compress=onebit": ["chunks", "shapes"],
    "sync-server:compress=fp16": ["mixed"],
    "sync-server:compress=int8": ["chunks", "batch norm", "unused"],
    "sync-server:compress=topk,ratio=0.2": ["chunks"],
    "local:every=2": ["batch norm", "own buffers", "mixed", "unused", "sparse"],
    "diloco:every=2": ["chunks"],
    "diloco:every=2,fragments=2,overlap=1,keep=0.25": ["batch norm"],
    "diloco:every=2,compress=fp4": ["mixed"],
    "diloco-server:quorum=2,every=2": ["chunks", "batch norm", "unused"],
    "diloco-server:quorum=2,every=2,compress=fp4": ["chunks", "mixed"],
}
WITH_CODECS = ("sync", "sync-server", "local:every=2", "diloco:every=2", "diloco-server:quorum=2,every=2")
OF_ONE_WORKER = tuple(f"async:compress={codec}" for codec in CODECS)


def with_codec(strategy: str, codec: str) -> str:
    return f"{strategy}{',' if ':' in strategy else ':'}compress={codec}"


def layout_of(model: Any, strategy: Any) -> Callable[[], Sequence[Sequence[Part]]]:
    """Chunks of servers, else buckets; the same object until they are laid out anew."""
    known: list[Any] = [None, None]

    def layout() -> Sequence[Sequence[Part]]:
        is_served = isinstance(strategy, ServerStrategy)
        laid_out = strategy.chunks if is_served else model.reducer.buckets
        if known[0] is not laid_out and is_served:
            specs = [spec for chunks in laid_out.of_bucket for spec, _, _ in chunks]
            known[:] = laid_out, [[Part(one.name, one.start, one.numel) for one in spec.segments] for spec in specs]
        elif known[0] is not laid_out:
            known[:] = laid_out, [whole(bucket.names, model.module) for bucket in laid_out]
        return known[1]

    return layout


def sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def made(model: Model) -> torch.nn.Module:
    torch.manual_seed(0)
    return model.make()


def first_difference(rank: int, world_size: int, specification: str, rule_name: str, model: Model) -> str:
    """Where this rank's replica and the rule's differ first; "" where they never do."""
    strategy = resolve_strategy(specification)
    ours = psengine.DistributedDataParallel(made(model), strategy=strategy, **model.options)
    optimizer = psengine.DistributedOptimizer(sgd(ours), ours)
    replicas = [made(model) for _ in range(world_size)]
    optimizers = [sgd(replica) for replica in replicas]
    rule = rule_of(rule_name, replicas, layout_of(ours, strategy))
    rule.exchanges_buffers = model.options.get("forward_sync_buffers", True)
    # A worker that comes later takes what the servers have.
    dist.barrier()
    is_rounded = model is MODELS["sparse"]  # its gradients may be coalesced or not
    for step in range(STEPS):
        optimizer.zero_grad()
        model.loss(ours, step, rank).backward()
        optimizer.step()
        rule.before_forward()
        for index, replica in enumerate(replicas):
            optimizers[index].zero_grad()
            model.loss(replica, step, index).backward()
        rule.before_step()
        for one in optimizers:
            one.step()
        rule.after_step()
        for kind, theirs in tensors(replicas[rank]):
            own = dict(tensors(ours.module))[kind]
            for place, (name, tensor) in enumerate(theirs.items()):
                where = {"step": step, "rank": rank, "kind": kind, "name": name, "place": place}
                found = find_difference(own[name], tensor, Tolerance(), **where)
                if found is not None and not (is_rounded and found.within):
                    strategy.close()
                    return found.where
    assert not all(map(torch.equal, ours.module.parameters(), made(model).parameters()))
    strategy.close()
    return ""


def tensors(module: torch.nn.Module) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("buffer", dict(module.named_buffers())),
        ("gradient", {name: parameter.grad for name, parameter in module.named_parameters()}),
        ("parameter", {name: parameter.detach() for name, parameter in module.named_parameters()}),
    ]


def differences(rank: int, world_size: int, address: str, job: str, trials: list[tuple[str, str, str]]) -> list[str]:
    """Of each (strategy, rule, model), in turn."""
    found = []
    for index, (strategy, rule, model) in enumerate(trials):
        specification: Any = strategy
        if strategy.startswith("async") or "-server" in strategy:
            own = {"job": f"{job}.{index}", "servers": address}
            specification = Specification.parse("strategy", strategy).with_options(**own)
        found.append(first_difference(rank, world_size, specification, rule, MODELS[model]))
    return found


@pytest.fixture
def address(server):
    return server.addresses[0]


def find(address: str, world_size: int, trials: list[tuple[str, str, str]]) -> dict[tuple[str, str, str], list[str]]:
    """What each rank finds in each trial."""
    results = run_ranks(differences, world_size, address, uuid.uuid4().hex, trials, deadline_s=150.0)
    return {trial: list(found) for trial, *found in zip(trials, *results, strict=True)}


def check(address: str, world_size: int, trials: list[tuple[str, str, str]]) -> None:
    assert {trial: found for trial, found in find(address, world_size, trials).items() if any(found)} == {}


def test_two_ranks_have_the_bits_of_the_rule(address):
    check(address, 2, [(strategy, strategy, model) for strategy, models in QUICK.items() for model in models])


def test_three_ranks_have_the_bits_of_the_rule(address):
    check(address, 3, [(f"sync:compress={codec}", f"sync:compress={codec}", "pieces") for codec in ("int8", "onebit")])


def test_one_worker_under_async_has_the_bits_of_the_rule(address):
    check(address, 1, [(strategy, strategy, "chunks") for strategy in OF_ONE_WORKER])


def test_another_rule_has_other_bits(address):
    trials = [
        ("sync:compress=int8", "sync:compress=int8,error_feedback=false", "chunks"),
        ("sync-server:compress=int8", "sync-server:compress=int8,error_feedback=false", "chunks"),
        ("local:every=2", "local:every=3", "batch norm"),
        ("diloco:every=2,compress=fp4", "diloco:every=2", "chunks"),
        ("diloco-server:quorum=2,every=2,compress=fp4", "diloco-server:quorum=2,every=2", "chunks"),
    ]
    assert all(all(found) for found in find(address, 2, trials).values())


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("strategy", WITH_CODECS)
def test_every_model_follows_the_rule_of_every_codec(address, strategy, codec):
    name = with_codec(strategy, codec)
    models = [model for model in MODELS if model != "pieces" and (model != "sparse" or "server" not in strategy)]
    check(address, 2, [(name, name, model) for model in models])
