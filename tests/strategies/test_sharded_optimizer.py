"""Strategy "sync:shard_optimizer=true": the bits of "sync", with a part of the optimizer's state on each rank."""

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.expectations import raises
from support.marks import slow
from support.native_extension import SHARED_MEMORY
from support.processes import in_ranks, run_ranks, run_ranks_to_any_end
from torch import nn

import psengine
from psengine.errors import ConfigurationError, ReductionError, ReplicaMismatchError
from psengine.strategies import sharding
from psengine.strategies.registry import resolve_strategy

SHARDED = "sync:shard_optimizer=true"


class Net(nn.Module):
    """Large and small parameters, odd sizes, other strides, one that is empty, one frozen, one used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.body = nn.Sequential(nn.Linear(180, 1001), nn.Tanh(), nn.Linear(1001, 211))
        self.head = nn.Linear(211, 3)
        self.spare = nn.Linear(211, 3, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)

    def forward(self, x: torch.Tensor, use_spare: bool = False) -> torch.Tensor:
        hidden = self.body(self.convolution(x).flatten(1))
        out = self.head(hidden) + (self.spare(hidden) if use_spare else 0)
        return (out * self.scale + self.empty.sum()).float()


def make_net() -> Net:
    torch.manual_seed(5)
    return Net()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    return [
        {"params": decayed, "weight_decay": 0.02},
        {"params": [p for n, p in model.named_parameters() if n.endswith("bias")], "lr": 0.03},
    ]


class OwnOptimizer(torch.optim.Optimizer):
    """A user's own: elementwise, with state of several kinds, and no step hooks or closures in mind."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    sign = state.setdefault("sign", torch.zeros_like(parameter))
                    sign.copy_(parameter.grad.sign() - sign)
                    parameter.add_(sign * parameter.abs().sqrt() + parameter.grad, alpha=-group["lr"] / state["count"])
        return loss


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1, maximize=True),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.05, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01, t0=2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "own": OwnOptimizer,
}


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1000 * rank + step))


def train(
    rank: int, world_size: int, strategy: str, name: str, options: dict[str, Any], steps: range, state: Any = None
) -> tuple[dict[str, torch.Tensor], Any, list[Any]]:
    """The values and the optimizer's state after ``steps``, and norms; ``state``: values and state to begin with."""
    model = psengine.DistributedDataParallel(make_net(), strategy=strategy, find_unused_parameters=True, **options)
    optimizer = psengine.DistributedOptimizer(OPTIMIZERS[name](groups_of(model.module)), model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
    if state is not None:
        model.module.load_state_dict(state[0])
        # A copy: tensors that come from another process are in memory that all ranks share.
        optimizer.load_state_dict(copy.deepcopy(state[1]))
        psengine.barrier()  # where ranks share the parameters, all have loaded them
    norms = []

    def clip(stepped: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [parameter for group in stepped.param_groups for parameter in group["params"]]
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 2.0))

    def note_sum(stepped: torch.optim.Optimizer, *_: Any) -> None:
        norms.append(sum(p.detach().double().sum() for group in stepped.param_groups for p in group["params"]))

    optimizer.register_step_post_hook(note_sum)
    for step in steps:
        optimizer.zero_grad(set_to_none=step % 3 != 1)
        with model.no_sync():
            model(batch_of(rank, 50 + step)).square().mean().backward()
        # torch's fused SGD needs the momentum of all parameters at once.
        uses_spare = step % 4 == (0 if name == "sgd-fused" else 2)

        backward = functools.partial(take_loss, model, batch_of(rank, step), uses_spare)
        if step % 2:
            assert optimizer.step(backward) > 0
        else:
            backward()
            handle = optimizer.register_step_pre_hook(clip)
            assert optimizer.step() is None
            handle.remove()
        scheduler.step()
    own_bytes = size_of(optimizer.state)
    saved = copy.deepcopy(optimizer.state_dict())
    values = {key: value.clone() for key, value in model.module.state_dict().items()}
    if isinstance(model.strategy, psengine.SyncShardedOptimizer):
        expected_bytes = size_of(saved["state"]) / world_size
        assert abs(own_bytes - expected_bytes) <= 4096, "this rank keeps its part of the state, up to some cache lines"
    model.leave()
    return values, saved, norms


def take_loss(model: nn.Module, batch: torch.Tensor, uses_spare: bool) -> float:
    loss = model(batch, uses_spare).square().mean()
    loss.backward()
    return loss.item()


def size_of(state: dict[Any, dict[str, Any]]) -> int:
    """Bytes of an optimizer's state, but for numbers."""
    values = [value for entry in state.values() for value in entry.values()]
    return sum(value.nbytes for value in values if torch.is_tensor(value) and value.dim())


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def train_all(rank: int, world_size: int, collective: str, names: list[str], compress: str = "") -> None:
    for name in names:
        options = {"collective": collective, "gradient_as_bucket_view": "adam" in name}
        wanted = train(rank, world_size, f"sync{compress and ':' + compress}", name, options, range(5))
        found = train(rank, world_size, f"{SHARDED}{compress and ',' + compress}", name, options, range(5))
        assert_same(found, wanted)


QUICK = ["nesterov", "adamw", "own"]
EVERY = [slow(world_size, collective, [*OPTIMIZERS]) for world_size in (1, 2, 3, 4) for collective in ("auto", "c10d")]


@pytest.mark.parametrize(("world_size", "collective", "names"), [(2, "auto", QUICK), (3, "c10d", QUICK), *EVERY])
def test_equals_the_unsharded_run(world_size, collective, names):
    run_ranks(train_all, world_size, collective, names)


def test_equals_the_unsharded_run_with_a_codec():
    run_ranks(train_all, 2, "auto", ["adamw-fused"], "compress=int8")


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
    for name in ("nesterov", "adam", "own"):
        state = run_ranks(train, 2, SHARDED, name, options, range(4))[1][:2]
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


def asked_alone(rank: int, world_size: int, collective: str) -> str:
    sharding.LATE_S = 0.5
    model, optimizer = make_pair(collective)
    loss_of(model, rank).backward()
    optimizer.step()
    whole = optimizer.state_dict()
    if rank == 0:
        assert_same(optimizer.state_dict(), whole)  # once more, while nothing has changed
    loss_of(model, rank, 1).backward()
    optimizer.step()
    try:
        if rank == 0:
            optimizer.state_dict()
        loss_of(model, rank, 2).backward()
    except psengine.PSEngineError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("collective", ["c10d", SHARED_MEMORY])
def test_a_rank_that_asks_for_the_state_alone_is_named_first(collective):
    first, second = run_ranks_to_any_end(asked_alone, 2, collective, group_timeout_s=20)
    assert first.value.startswith("ConfigurationError: optimizer.state_dict() puts the parts of all ranks together")
    assert "got one on rank 0, and rank 1 (process " in first.value
    assert "in all-reduce of gradient bucket 0" in first.value
    assert "PeerLostError" in str(second.value or second.error)


@pytest.mark.parametrize("collective", ["auto", "c10d"])
@in_ranks(2)
def test_grad_scaler_decides_alike_on_all_ranks(rank: int, world_size: int, collective: str) -> None:
    """One rank's loss overflows in the second step: all leave it out, and halve the scale."""
    for name in ("adamw", "adamw-fused"):
        runs = []
        for strategy in (SHARDED, "sync"):
            model, optimizer = make_pair(collective, strategy, OPTIMIZERS[name])
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=10)
            for step in range(3):
                optimizer.zero_grad()
                bad = torch.tensor(float("inf")) if step == 1 and rank == world_size - 1 else 1.0
                scaler.scale(loss_of(model, rank, step) * bad).backward()
                if step == 2:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            assert scaler.get_scale() == 2.0
            runs.append(values_of(model))
        assert_same(*runs)


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
    # A part of the model takes its own bytes only.
    if rank == 0:
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
    with raises(ReductionError, "serves no model"):
        optimizer.step()


@in_ranks(2)
def test_goes_on_in_another_group_with_whole_state(rank, world_size):
    values = []
    for strategy in ("sync", SHARDED):
        model, optimizer = make_pair("auto", strategy)
        for step in range(4):
            if step == 2:
                optimizer.state_dict()
                model._update_process_group(dist.new_group([0, 1]))
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        values.append(values_of(model))
    assert_same(*values)
    with raises(ReductionError, "has this rank's part of the state only", "Fix: call optimizer.state_dict()"):
        model._update_process_group(dist.new_group([0, 1]))
    with raises(ReductionError, "has this rank's part of the state only"):
        copy.deepcopy(optimizer)
    state = optimizer.state_dict()["state"]  # nothing has changed
    plain = copy.deepcopy(optimizer)
    assert type(plain).__name__ == "AdamW"
    assert_same(plain.state_dict()["state"], state)


@in_ranks(1)
def test_what_is_refused(rank, world_size):
    assert str(resolve_strategy("sync:compress=bf16,shard_optimizer=true")) == f"{SHARDED},compress=bf16"
    for text, *expected in (
        ("sync:shard_optimizer=1", "shard_optimizer of strategy 'sync' (expected true or false, got 1)"),
        ("sync-server:shard_optimizer=true", "unknown option", "Fix: shard_optimizer is an option of strategy 'sync'"),
    ):
        with raises(ConfigurationError, *expected):
            resolve_strategy(text)
    with raises(ConfigurationError, "dense gradients", "sparse gradients for 'weight'", "Fix: strategy='sync'"):
        psengine.DistributedDataParallel(nn.Embedding(5, 3, sparse=True), strategy=SHARDED)
    model = psengine.DistributedDataParallel(nn.Linear(2, 2), strategy=SHARDED)
    for kind in (torch.optim.LBFGS, torch.optim.Adafactor):
        with raises(ConfigurationError, "treats each element alike", f"got {kind.__name__}", "strategy='sync'"):
            psengine.DistributedOptimizer(kind(model.parameters()), model)
    with model.join(), raises(ConfigurationError, "join cannot shadow", "drop_last=True"):
        model(torch.ones(1, 2)).sum().backward()
    model = psengine.DistributedDataParallel(nn.Linear(2, 2), strategy=SHARDED)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    message = ["each rank steps only its range", "optimizer = psengine.DistributedOptimizer(optimizer, model)", "SGD"]
    with raises(ConfigurationError, *message):
        plain.step()
    optimizer = psengine.DistributedOptimizer(plain, model)
    optimizer.step()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with raises(ConfigurationError, *message):
        other.step()
    torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).step()  # another model's
    with raises(ConfigurationError, "steps one optimizer", "got 2"):
        psengine.DistributedOptimizer(other, model)
    model.module.weight.data = torch.zeros(2, 2)
    with raises(ReductionError, "'weight' was given other memory", "parameter.data.copy_"):
        optimizer.step()


@in_ranks(2)
def test_ranks_that_shard_differently_say_so(rank, world_size):
    with raises(ReplicaMismatchError, "shard_optimizer=true", "got, by rank, the defaults; shard_optimizer=true;"):
        psengine.DistributedDataParallel(nn.Linear(2, 2), strategy=SHARDED if rank else "sync")
    model = psengine.DistributedDataParallel(nn.Linear(2, 2), strategy=SHARDED)
    with raises(ReplicaMismatchError, "got, by rank, group 0 lr=0.1; group 0 lr=0.2"):
        psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.2 if rank else 0.1), model)
