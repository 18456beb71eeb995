"""Replicas that must be equal are compared while they train: drift of one bit is named, and nothing else is."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.processes import in_ranks, run_ranks
from support.server_process import running_server

import psengine
from psengine.errors import ReplicasDivergedError
from psengine.strategies.replica_watch import digest, is_due, total_digest


def test_the_schedule_is_dense_first_and_depends_on_the_step_alone():
    assert [step for step in range(3500) if is_due(step)] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000, 3000]
    # Rounds of six steps: the first chance after each of these.
    assert [step for step in range(0, 1100, 6) if is_due(step, 6)] == [6, 12, 18, 36, 66, 132, 258, 516, 1002]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("numel", [1, 1023, 3 * 8192 + 5, 70_000])
def test_a_digest_knows_every_bit_and_its_place(dtype, numel):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    known = {tuple(digest(values).tolist())}
    size = values.nbytes
    for place in {0, size // 3, size - 1}:
        for bit in (1, 128):
            changed = values.clone()
            changed.view(torch.uint8).view(-1)[place] ^= bit
            known.add(tuple(digest(changed).tolist()))
    changed = values.flip(0)
    known.add(tuple(digest(changed).tolist()))
    assert len(known) == 1 + 2 * len({0, size // 3, size - 1}) + (not torch.equal(changed, values))
    assert torch.equal(digest(values), digest(values.clone()))


def test_a_digest_sees_signs_that_would_cancel_each_other():
    zeros = torch.zeros(4096)
    flipped = zeros.clone()
    flipped[[1, 3]] = -0.0
    assert not torch.equal(total_digest([zeros]), total_digest([flipped]))


def train(model: Any, optimizer: Any, rank: int, steps: int, before_step: Callable[[int], None]) -> None:
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))).pow(2).mean().backward()
        before_step(step)
        optimizer.step()


def wrapped(strategy: str, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = psengine.DistributedDataParallel(torch.nn.Linear(3, 2), strategy=strategy, **options)
    return model, psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


def flip_a_bit(model: Any) -> None:
    with torch.no_grad():
        model.module.bias.view(torch.int32)[1] ^= 1 << 20


def drifts(rank: int, world_size: int, strategy: str, flip_after: int, named_after: int) -> None:
    """Worker 1 drifts by the last bit of one value, inside a step; all are told at the second comparison after it."""
    model, optimizer = wrapped(strategy, check_replicas="error")
    seen = []

    def before_step(step: int) -> None:
        seen.append(step)
        if rank == 1 and step == flip_after:
            flip_a_bit(model)

    with pytest.raises(ReplicasDivergedError, match="'bias'") as raised:
        train(model, optimizer, rank, named_after + 1, before_step)
    assert (raised.value.parameter, raised.value.workers, seen[-1]) == ("bias", (1,), named_after)
    assert "1 of 2 parameters differ" in str(raised.value)
    assert "changed outside of optimizer.step()" in str(raised.value)


@pytest.mark.parametrize(
    ("strategy", "flip_after", "named_after"), [("sync", 3, 5), ("sync", 300, 513), ("sync:compress=int8", 3, 5)]
)
def test_drift_of_one_bit_is_named_on_all_ranks(strategy, flip_after, named_after):
    run_ranks(drifts, 3, strategy, flip_after, named_after)


def drifts_at_servers(rank: int, world_size: int, address: str) -> None:
    model, optimizer = wrapped(f"sync-server:servers={address}", check_replicas="error")

    def before_step(step: int) -> None:
        if rank == 1 and step == 3:
            flip_a_bit(model)

    if rank == 0:  # its values count; the one that drifted ends
        train(model, optimizer, rank, 5, before_step)
    else:
        with pytest.raises(ReplicasDivergedError, match="'bias'") as raised:
            train(model, optimizer, rank, 6, before_step)
        assert raised.value.workers == (1,)
    model.leave()


def test_a_worker_that_drifts_from_the_lowest_one_at_servers_ends():
    with running_server(shards=1) as server:
        run_ranks(drifts_at_servers, 2, server.addresses[0])


@in_ranks(2)
def test_a_cause_is_named_where_replicas_know_it(rank, world_size):
    for kind, expected in {
        "lr": "lr of DistributedSGD's group 0 is 0.2 on worker 1, and 0.1 on worker 0",
        "load": "the last load_state_dict, after step is 0 on worker 1, and none on worker 0",
    }.items():
        model, optimizer = wrapped("sync", check_replicas="error")
        if rank == 1 and kind == "lr":
            optimizer.param_groups[0]["lr"] = 0.2
        if rank == 1 and kind == "load":
            model.module.load_state_dict({name: 2 * value for name, value in model.module.state_dict().items()})
        with pytest.raises(ReplicasDivergedError) as raised:
            train(model, optimizer, rank, 3, lambda step: None)
        assert f"Cause: {expected}." in str(raised.value)


@in_ranks(2)
def test_rounds_are_compared_as_a_whole_and_on_demand(rank, world_size):
    model, optimizer = wrapped("local:every=2", check_replicas="error")
    train(model, optimizer, rank, 6, lambda step: None)
    model.check_replicas()
    if rank == 1:
        flip_a_bit(model)
    with pytest.raises(ReplicasDivergedError, match="Known to be equal: after step 6"):
        model.check_replicas()


@in_ranks(2)
def test_a_step_on_gradients_that_were_not_exchanged_says_which_and_why(rank, world_size):
    """minimind #853, OpenTSLM #49, FunASR #3472, pytorch #76464: native DDP is silent."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("psengine.gradients.step_guard").addHandler(handler)
    x = torch.ones(2, 3) * (1 + rank)

    def backward(model: Any, how: str) -> None:
        if how == "module":
            model.module(x).sum().backward()
        elif how == "no_sync":
            with model.no_sync():
                model(x).sum().backward()
        else:
            model(x).sum().backward()

    for backwards, expected in {
        ("no_sync", "sync"): "",
        ("module",): "did not go through the wrapper",
        ("no_sync", "no_sync"): "all backwards of this step were inside no_sync()",
        ("sync", "no_sync"): "on another micro-batch than the last",
    }.items():
        model, optimizer = wrapped("sync", check_replicas="off")
        for _ in range(2):  # said once
            optimizer.zero_grad()
            for how in backwards:
                backward(model, how)
            optimizer.step()
        assert len(said) == (1 if expected else 0), said
        assert not expected or (expected in said[0] and "'bias'" in said[0])
        said.clear()
    model, optimizer = wrapped("sync", check_replicas="off")
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    model.module.bias.register_post_accumulate_grad_hook(lambda parameter: plain.step())
    model(x).sum().backward()
    assert "stepped inside backward" in said[0]
    model, optimizer = wrapped("sync-server")
    model.module(x).sum().backward()
    optimizer.step()
    assert "did not go through the wrapper" in said[-1]
    model.leave()
