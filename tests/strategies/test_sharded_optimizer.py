"""Strategy "sync:shard_optimizer=true": the bits of "sync", with a share of the optimizer's state on each rank."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.expectations import raises
from support.processes import in_ranks, run_ranks
from torch import nn

import psengine
from psengine.errors import ConfigurationError, ReductionError, ReplicaMismatchError
from psengine.strategies.registry import resolve_strategy

SHARDED = "sync:shard_optimizer=true"


class Net(nn.Module):
    """Large and small parameters, odd sizes, other strides, one that is frozen and one that is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.body = nn.Sequential(nn.Linear(180, 1001), nn.Tanh(), nn.Linear(1001, 211))
        self.head = nn.Linear(211, 3)
        self.spare = nn.Linear(211, 3, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)

    def forward(self, x: torch.Tensor, use_spare: bool = False) -> torch.Tensor:
        hidden = self.body(self.convolution(x).flatten(1))
        out = self.head(hidden) + (self.spare(hidden) if use_spare else 0)
        return (out * self.scale).float()


def make_net() -> Net:
    torch.manual_seed(5)
    return Net()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    return [
        {"params": decayed, "weight_decay": 0.02},
        {"params": [p for n, p in model.named_parameters() if n.endswith("bias")], "lr": 0.03},
    ]


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1, maximize=True),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1000 * rank + step))


def train(
    rank: int, world_size: int, strategy: str, name: str, options: dict[str, Any], steps: range, state: Any = None
) -> tuple[dict[str, torch.Tensor], Any]:
    """The values and the optimizer's state after ``steps``; ``state``: both to begin with."""
    model = psengine.DistributedDataParallel(make_net(), strategy=strategy, find_unused_parameters=True, **options)
    optimizer = psengine.DistributedOptimizer(OPTIMIZERS[name](groups_of(model.module)), model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
    if state is not None:
        model.module.load_state_dict(state[0])
        # A copy: tensors that come from another process are in memory that all ranks share.
        optimizer.load_state_dict(copy.deepcopy(state[1]))
        psengine.barrier()  # where ranks share the parameters, all have loaded them
    for step in steps:
        # What stays a bucket's view is divided, and else multiplied; a share's gradients do not all stay.
        optimizer.zero_grad(set_to_none=step % 3 != 1 or "gradient_as_bucket_view" in options)
        with model.no_sync():
            model(batch_of(rank, 50 + step)).square().mean().backward()
        # torch's fused SGD needs the momentum of all parameters at once.
        uses_spare = step % 4 == (0 if name == "sgd-fused" else 2)
        model(batch_of(rank, step), uses_spare).square().mean().backward()
        assert optimizer.step(lambda: 3.0) == 3.0
        scheduler.step()
    saved = copy.deepcopy(optimizer.state_dict())
    values = {key: value.clone() for key, value in model.module.state_dict().items()}
    assert rank or is_share(model, world_size), "rank 0 keeps its share of the state only"
    model.leave()
    return values, saved


def is_share(model: psengine.DistributedDataParallel, world_size: int) -> bool:
    """Whether this rank's state is its part of the whole state, up to a few cache lines."""
    if not isinstance(model.strategy, psengine.SyncShardedOptimizer):
        return True
    bound = model.strategy._optimizer
    slots = len(bound.blocks[0].optimizer.slots())
    whole_bytes = slots * sum(p.nbytes for p in model.module.parameters() if p.requires_grad)
    return whole_bytes / world_size <= bound.size_bytes <= whole_bytes / world_size + slots * 4096


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def train_all(rank: int, world_size: int, collective: str, names: list[str]) -> None:
    for name in names:
        options = {"collective": collective}
        if "adam" in name:
            options["gradient_as_bucket_view"] = True
        wanted = train(rank, world_size, "sync", name, options, range(5))
        assert_same(train(rank, world_size, SHARDED, name, options, range(5)), wanted)


@pytest.mark.parametrize(("world_size", "collective"), [(2, "auto"), (3, "c10d")])
def test_equals_the_unsharded_run(world_size, collective):
    run_ranks(train_all, world_size, collective, ["nesterov", "adamw"])


def train_without_unused(rank: int, strategy: str, collective: str) -> list[Any]:
    """Gradients and values of steps that reset gradients to None, to zeros, or add to what ``no_sync`` left."""
    model = psengine.DistributedDataParallel(make_net(), strategy=strategy, collective=collective)
    optimizer = psengine.DistributedOptimizer(OPTIMIZERS["nesterov"](groups_of(model.module)), model)
    seen = []
    for step in range(6):
        optimizer.zero_grad(set_to_none=step % 3 == 0)
        if step % 3 == 2:
            with model.no_sync():
                model(batch_of(rank, 50 + step), True).square().mean().backward()
        model(batch_of(rank, step), True).square().mean().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if strategy == SHARDED:
            buckets = {bucket.flat.untyped_storage().data_ptr() for bucket in model.reducer.buckets}
            assert {gradient.untyped_storage().data_ptr() for gradient in gradients} <= buckets, "lent, not copied"
        norm = psengine.clip_grad_norm_(model, 100.0)
        seen += [norm] if collective == "c10d" else [gradient.clone() for gradient in gradients]
        optimizer.step()
        seen += [parameter.detach().clone() for parameter in model.parameters()]
    model.leave()
    return seen


def train_without_unused_both(rank: int, world_size: int, collective: str) -> None:
    wanted = train_without_unused(rank, "sync", collective)
    found = train_without_unused(rank, SHARDED, collective)
    # A norm of shares is added in another order.
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5 if one.dim() == 0 and collective == "c10d" else 0, atol=0)


@pytest.mark.parametrize(("world_size", "collective"), [(2, "auto"), (3, "c10d")])
def test_lent_gradients_have_the_bits_of_copied_ones(world_size, collective):
    run_ranks(train_without_unused_both, world_size, collective)


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["auto", "c10d"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_optimizer_equals_the_unsharded_run(world_size, collective):
    run_ranks(train_all, world_size, collective, list(OPTIMIZERS))


def goes_on(rank: int, world_size: int, name: str, options: dict[str, Any], state: Any) -> tuple[Any, Any, Any]:
    """Go on from a state: sharded, unsharded, and with torch alone what was loaded."""
    sharded = train(rank, world_size, SHARDED, name, options, range(4, 7), state)
    whole = train(rank, world_size, "sync", name, options, range(4, 7), state)
    model = make_net()
    plain = OPTIMIZERS[name](groups_of(model))
    plain.load_state_dict(state[1])
    return sharded, whole, plain.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["auto", "c10d"])
def test_a_state_goes_on_at_another_world_size_and_in_torch(collective):
    options = {"collective": collective}
    for name in ("nesterov", "adam"):
        state = run_ranks(train, 2, SHARDED, name, options, range(4))[1]
        for world_size in (1, 3):
            for sharded, whole, loaded in run_ranks(goes_on, world_size, name, options, state):
                assert_same(sharded, whole)
                assert_same(loaded, state[1])


def make_pair(
    collective: str | psengine.Collective, strategy: str = SHARDED, make: Any = OPTIMIZERS["adamw"], **options: Any
) -> tuple[psengine.DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(6, 500), nn.Tanh(), nn.Linear(500, 3))
    model = psengine.DistributedDataParallel(module, strategy=strategy, collective=collective, **options)
    return model, psengine.DistributedOptimizer(make(model.parameters()), model)


def loss_of(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))
    return model(x).square().mean()


def values_of(model: nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


@in_ranks(2)
def test_clipping_over_messages_is_psengines(rank, world_size):
    norms = []
    for strategy in (SHARDED, "sync"):
        model, optimizer = make_pair("c10d", strategy)
        loss_of(model, rank).backward()
        norms.append(psengine.clip_grad_norm_(model, 0.1))
        optimizer.step()
        clipped = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    torch.testing.assert_close(*norms)
    model, optimizer = make_pair("c10d")
    own = {index for index, pieces in model.strategy._pieces.items() if any(p.owner == rank for p in pieces)}
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        assert {i for i, p in enumerate(model.parameters()) if p.grad is not None} == own
        assert own == ({0} if rank == 0 else {0, 1, 2, 3}), "the first is cut"
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if step == 0:
            with pytest.warns(UserWarning, match=r"scaled their gradients differently .*Fix: psengine.clip_grad_norm_"):
                optimizer.step()
        else:
            optimizer.step()  # said once
    assert clipped


def scaled(rank: int, world_size: int, collective: str) -> list[float]:
    """One rank's loss overflows in the second step: all leave it out, and halve the scale."""
    runs = []
    for strategy in (SHARDED, "sync"):
        model, optimizer = make_pair(collective, strategy)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=10)
        for step in range(3):
            optimizer.zero_grad()
            bad = torch.tensor(float("inf")) if step == 1 and rank == world_size - 1 else 1.0
            scaler.scale(loss_of(model, rank, step) * bad).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        runs.append((values_of(model), scaler.get_scale()))
    assert_same(*runs)
    return runs[0][1]


@pytest.mark.parametrize("collective", ["auto", "c10d"])
def test_grad_scaler_decides_alike_on_all_ranks(collective):
    assert run_ranks(scaled, 2, collective) == [2.0, 2.0]


@in_ranks(2)
def test_parameters_in_shared_memory(rank, world_size):
    model, optimizer = make_pair("auto")
    before = values_of(model)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    first = next(model.parameters())
    # One memory for all: what one rank writes, another reads.
    psengine.barrier()
    if rank == 0:
        first.data[0, 0] = 77.0
    psengine.barrier()
    assert first[0, 0] == 77.0
    # One rank alone saves, whole; a part of the model takes its own bytes only.
    if rank == 0:
        state = optimizer.state_dict()
        assert [entry["exp_avg"].shape for entry in state["state"].values()] == [p.shape for p in model.parameters()]
        file = io.BytesIO()
        torch.save(model.module[2].state_dict(), file)
        assert len(file.getvalue()) < 500 * 3 * 4 + 4096
    copied = copy.deepcopy(model.module)
    psengine.barrier()
    with torch.no_grad():
        copied[0].weight.zero_()
    assert first[0, 0] == 77.0, "a copy has memory of its own"
    stepped = values_of(model)
    assert not torch.equal(stepped, before)
    model.leave()
    assert torch.equal(values_of(model), stepped)
    with torch.no_grad():
        first.fill_(rank)
    psengine.barrier()
    assert (first == rank).all(), "after leave() each rank has its own again"
    with raises(ReductionError, "was not prepared"):
        optimizer.step()


@in_ranks(1)
def test_what_is_refused(rank, world_size):
    for text, *expected in (
        ("sync:shard_optimizer=1", "shard_optimizer of strategy 'sync' (expected true or false, got 1)"),
        ("sync:shard_optimizer=true,compress=bf16", "expected no compress, got bf16", "Fix: leave one of the two out"),
        ("sync-server:shard_optimizer=true", "unknown option", "Fix: shard_optimizer is an option of strategy 'sync'"),
    ):
        with raises(ConfigurationError, *expected):
            resolve_strategy(text)
    for module, got in (
        (nn.Embedding(5, 3, sparse=True), "sparse gradients for 'weight'"),
        (nn.Linear(2, 2).bfloat16(), "torch.bfloat16 for 'weight'"),
    ):
        with raises(ConfigurationError, "steps dense float32 and float64 parameters", got, "Fix: strategy='sync'"):
            psengine.DistributedDataParallel(module, strategy=SHARDED)
    model = psengine.DistributedDataParallel(nn.Linear(2, 2), strategy=SHARDED)
    with raises(ConfigurationError, "does not cover this optimizer", "got NAdam", "strategy='sync'"):
        psengine.DistributedOptimizer(torch.optim.NAdam(model.parameters()), model)
    with raises(ConfigurationError, "expected no communication hook"):
        model.register_comm_hook(None, comm_hook)
    with raises(ConfigurationError, "join cannot shadow", "drop_last=True"):
        model.join()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    message = ["each rank steps only its share", "optimizer = psengine.DistributedOptimizer(optimizer, model)", "SGD"]
    with raises(ConfigurationError, *message):
        plain.step()
    optimizer = psengine.DistributedOptimizer(plain, model)
    optimizer.step()
    with raises(ConfigurationError, *message):
        plain.step()
    torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).step()  # another model's
    with raises(ConfigurationError, "steps one optimizer", "got 2"):
        psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with raises(ConfigurationError, "expected 1 groups, got 2"):
        optimizer.step()
    del optimizer.param_groups[1]
    model.module.weight.data = torch.zeros(2, 2)
    with raises(ReductionError, "'weight' was given other memory", "parameter.data.copy_"):
        optimizer.step()


@in_ranks(2)
def test_a_step_without_any_gradient_warns(rank, world_size):
    model, optimizer = make_pair("auto")
    loss_of(model, rank).backward()
    optimizer.step()
    model.module.load_state_dict({k: v.clone() for k, v in model.module.state_dict().items()}, assign=True)
    optimizer.zero_grad()
    loss_of(model, rank).backward()
    with pytest.warns(UserWarning, match=r"this step changes nothing.*load_state_dict\(..., assign=True\)"):
        optimizer.step()


def comm_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    raise AssertionError("never called")


@in_ranks(2)
def test_ranks_that_shard_differently_say_so(rank, world_size):
    with raises(ReplicaMismatchError, "shard_optimizer=true", "got, by rank, compress=none; shard_optimizer=true;"):
        psengine.DistributedDataParallel(nn.Linear(2, 2), strategy=SHARDED if rank else "sync")
