"""``model.batch_weight``: averages by samples, against one plain process over all ranks' samples."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.expectations import raises
from support.processes import in_ranks, run_ranks
from support.server_training import at_servers
from support.table_training import warnings_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils._pytree import tree_leaves

import psengine
from psengine import DistributedDataParallel
from psengine.errors import ArgumentTypeError, ConfigurationError
from psengine.strategies.base import Strategy

FEATURES = 12


class Perceptron(nn.Module):
    """One layer is large enough to be packed by itself, the others are packed together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 1000), nn.Tanh(), nn.Linear(1000, 30), nn.Tanh(), nn.Linear(30, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Optional(nn.Module):
    """``b`` serves batches of an odd size only, ``never`` none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = nn.Linear(FEATURES, 1), nn.Linear(FEATURES, 1), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x) if len(x) % 2 else self.a(x)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 3, sparse=True)
        self.out = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.words((x * 10).long().abs().clamp(max=49)).mean(1))


def seeded(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return build().to(dtype)


def share_of(rank: int, step: int) -> int:
    """Samples of a rank: uneven, and rank 0's third and fourth batches are empty."""
    return 0 if rank == 0 and step in (2, 3) else 1 + 3 * rank + (step + rank) % 3


def batches_of(step: int, world_size: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every rank's batch of a step; each rank can make them all."""
    generator = torch.Generator().manual_seed(step)
    counts = [share_of(rank, step) for rank in range(world_size)]
    x = torch.randn(sum(counts), FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    y = x.sum(1, keepdim=True).sin()
    return list(zip(x.split(counts), y.split(counts), strict=True))


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
}
# float64 sums of a few dozen samples in another order differ by some 1e-16; Adam divides small gradients by themselves.
FLOAT64 = {"rtol": 1e-9, "atol": 1e-12}
CASES: list[tuple[Callable[[], nn.Module], str, torch.dtype, dict[str, Any], dict[str, float]]] = [
    (Perceptron, "SGD", torch.float64, {}, FLOAT64),
    (Perceptron, "AdamW", torch.float64, {"gradient_as_bucket_view": True}, FLOAT64),
    (Perceptron, "SGD", torch.float64, {"bucket_cap_mb": 1e-5, "check_finite": True}, FLOAT64),
    (Perceptron, "SGD", torch.float64, {"static_graph": True}, FLOAT64),
    (Perceptron, "SGD", torch.float32, {}, {"rtol": 1e-4, "atol": 1e-6}),
    (Perceptron, "SGD", torch.float32, {"strategy": "sync:compress=bf16"}, {"rtol": 0.05, "atol": 0.01}),
    (Sparse, "SGD", torch.float64, {}, FLOAT64),
]


def train_beside_one_process(rank: int, world_size: int, cases: list[Any], **more: Any) -> None:
    for build, optimizer_name, dtype, options, tolerance in cases:
        model = DistributedDataParallel(seeded(build, dtype), **options, **more)
        reference = seeded(build, dtype)
        pairs = [(m, OPTIMIZERS[optimizer_name](m.parameters())) for m in (model, reference)]
        for step in range(4):
            batches = batches_of(step, world_size, dtype)
            model.batch_weight(len(batches[rank][0]))
            together = tuple(map(torch.cat, zip(*batches, strict=True)))
            for (m, optimizer), (x, y) in zip(pairs, (batches[rank], together), strict=True):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                # Gradients of a rank without samples are NaN, and count nothing.
                loss = nn.functional.mse_loss(m(x), y) if len(x) else m(torch.ones_like(together[0])).sum() * math.nan
                loss.backward()
                optimizer.step()
        for (name, p), q in zip(reference.named_parameters(), model.parameters(), strict=True):
            assert torch.allclose(p, q, **tolerance), (build.__name__, options, name, (p - q).abs().max())
        model.leave()


def over_collective(rank: int, world_size: int, collective: str) -> None:
    cases = CASES if world_size == 2 else CASES[::3]
    train_beside_one_process(rank, world_size, cases, collective=collective)


@pytest.mark.parametrize(("collective", "world_size"), [("auto", 2), ("c10d", 4)])
def test_uneven_batches_train_like_one_process(collective, world_size):
    run_ranks(over_collective, world_size, collective)


@pytest.mark.parametrize(("collective", "skips"), [("auto", False), ("c10d", True)])
@in_ranks(2)
def test_parameters_that_some_batches_do_not_use(rank: int, world_size: int, collective: str, skips: bool) -> None:
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": skips, "bucket_cap_mb": 1e-5}
    model = DistributedDataParallel(seeded(Optional), collective=collective, **options)
    reference = seeded(Optional)
    for step in range(5):
        batches = batches_of(step, world_size, torch.float64)
        total = sum(len(x) for x, _ in batches)
        model.zero_grad()
        reference.zero_grad()
        model.batch_weight(len(batches[rank][0]))
        nn.functional.mse_loss(model(batches[rank][0]), batches[rank][1]).backward()
        losses = [nn.functional.mse_loss(reference(x), y, reduction="sum") / total for x, y in batches if len(x)]
        sum(losses).backward()
        for p, q in zip(reference.parameters(), model.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.allclose(p.grad, q.grad, **FLOAT64)


@in_ranks(2)
def test_micro_batches(rank, world_size):
    """The documented recipe: a mean over all of this rank's samples, one weight for all that it accumulates."""
    model = DistributedDataParallel(seeded(Perceptron))
    reference = seeded(Perceptron)
    mine = [batches_of(step, world_size, torch.float64)[rank] for step in range(2)]
    count = sum(len(x) for x, _ in mine)
    for position, (x, y) in enumerate(mine):
        is_last = position == len(mine) - 1
        if position == 0:
            model.batch_weight(count)
        with torch.enable_grad() if is_last else model.no_sync():
            (nn.functional.mse_loss(model(x), y, reduction="sum") / count).backward()
    together = [batch for step in range(2) for batch in batches_of(step, world_size, torch.float64)]
    x, y = map(torch.cat, zip(*together, strict=True))
    nn.functional.mse_loss(reference(x), y).backward()
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, **FLOAT64)


JOINED_BATCHES = [0, 1, 3]


@in_ranks(3)
def test_ranks_that_joined_have_no_say(rank, world_size):
    model = DistributedDataParallel(seeded(Perceptron))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with model.join(divide_by_initial_world_size=False):
        for step in range(JOINED_BATCHES[rank]):
            x, y = batches_of(step, world_size, torch.float64)[rank]
            model.batch_weight(len(x) if step != 1 else None)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    reference = seeded(Perceptron)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
    for step in range(3):
        live = [batches_of(step, 3, torch.float64)[rank] for rank in range(3) if step < JOINED_BATCHES[rank]]
        x, y = map(torch.cat, zip(*live, strict=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(reference(x), y).backward()
        optimizer.step()
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        assert torch.allclose(p, q, **FLOAT64)


@in_ranks(2)
def test_what_is_refused(rank, world_size):
    model = DistributedDataParallel(seeded(Perceptron))
    for weight, error, text in [
        (-1, ConfigurationError, "expected a finite number >= 0, got -1"),
        (math.nan, ConfigurationError, "got nan"),
        (math.inf, ConfigurationError, "got inf"),
        (10**400, ConfigurationError, "got inf"),
        ("8", ArgumentTypeError, "expected a float or None, got str"),
        (True, ArgumentTypeError, "got bool"),
        (torch.ones(2), ArgumentTypeError, "got Tensor"),
    ]:
        with raises(error, text):
            model.batch_weight(weight)

    x = torch.ones(1, FEATURES, dtype=torch.float64)
    model.register_comm_hook(None, allreduce_hook)
    model.batch_weight(1)
    with raises(ConfigurationError, "a communication hook"):
        model(x)

    module = seeded(Perceptron)
    delayed = [("layers.0.weight", module.layers[0].weight)]
    model = DistributedDataParallel(
        module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module.layers[0].weight
    )
    with raises(ConfigurationError, "no delay_all_reduce_named_params"):
        model.batch_weight(1)
    with raises(ConfigurationError, "strategy 'sync' does not average gradients by samples"):
        Strategy.weigh(psengine.SyncAllReduce(), 2.0)  # what a strategy of one's own inherits
    Strategy.weigh(psengine.SyncAllReduce(), None)


@at_servers(2)
def test_servers_average_by_weight_or_refuse(rank, world_size):
    train_beside_one_process(rank, world_size, CASES[:1], strategy="sync-server")
    model = DistributedDataParallel(seeded(Perceptron), strategy=psengine.AsyncServer(job="applied"))
    model.batch_weight(2)
    with raises(ConfigurationError, "does not average gradients by samples", "expected no batch_weight, got 2"):
        model(torch.ones(1, FEATURES, dtype=torch.float64))
    model.leave()


@at_servers(2)
def test_servers_leave_out_a_step_in_which_nobody_has_a_say(rank, world_size):
    """The third of four, and one more by a closure. Buffers are rank 0's, as after any step."""
    messages = warnings_of("psengine.strategies.servers")
    network = seeded(lambda: nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 40)), torch.float32)
    model = DistributedDataParallel(network, strategy="sync-server:compress=int8")
    plain = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    optimizer, norm = psengine.DistributedOptimizer(plain, model), nn.BatchNorm1d(FEATURES)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    stepped: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(0))

    def tensors() -> list[torch.Tensor]:
        """All but buffers that a step may change."""
        kept = [list(network.parameters()), optimizer.state_dict(), model.strategy.residuals()]
        return [one.detach().clone() for one in tree_leaves(kept) if isinstance(one, torch.Tensor)]

    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 1)
        model.batch_weight(0 if step == 2 else 1 + rank)
        of_0, of_1 = torch.randn(2, 8, FEATURES, generator=torch.Generator().manual_seed(step))
        norm(of_0)
        before = tensors()
        scaler.scale(model(of_1 if rank else of_0).square().mean()).backward()
        assert all((not parameter.grad.any()) == (step == 2) for parameter in network.parameters())
        scaler.step(optimizer)
        scaler.update()
        assert all(map(torch.equal, before, tensors())) == (step == 2)
        assert all(map(torch.equal, network[0].buffers(), norm.buffers()))
    assert len(stepped) == 3
    assert model.statistics().empty_steps == 1

    def closure() -> float:
        model.batch_weight(0)
        loss = model(of_0).square().mean()
        loss.backward()
        return loss.item()

    before = tensors()
    assert optimizer.step(closure) > 0
    assert all(map(torch.equal, before, tensors()))
    assert model.statistics().empty_steps == 2
    assert len([one for one in messages if "no worker contributed to step 3" in one]) == 1
    model.leave()
