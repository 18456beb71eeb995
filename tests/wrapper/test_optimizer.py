"""DistributedOptimizer: a true optimizer of the wrapped class; and several of one model, with a joiner."""

import functools
import gc
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.expectations import raises
from support.native_twins import Net, seeded
from support.processes import in_ranks, run_ranks
from support.server_training import at_servers
from support.waiting import eventually
from torch import nn

import psengine
from psengine import DistributedDataParallel, DistributedOptimizer
from psengine.errors import ServerError
from psengine.strategies.servers.worker_state import unpack


@in_ranks(1)
def test_errors(rank, world_size):
    model = DistributedDataParallel(seeded(Net))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with raises(TypeError, "expected a torch.optim.Optimizer and a model", "(got int and DistributedDataParallel)"):
        DistributedOptimizer(3, model)
    with raises(TypeError, "psengine.DistributedDataParallel (got SGD and Net)"):
        DistributedOptimizer(optimizer, model.module)
    with raises(ValueError, "already"):
        DistributedOptimizer(DistributedOptimizer(optimizer, model), model)
    stranger = torch.optim.SGD(
        [{"params": model.module.body.parameters()}, {"params": [torch.nn.Parameter(torch.ones(3))]}]
    )
    with raises(ValueError, "parameter 0 of group 1 (shape (3,)) is not one of the model's"):
        DistributedOptimizer(stranger, model)
    for with_scheduler in (False, True):
        patched = torch.optim.SGD(model.parameters(), lr=0.1)
        if with_scheduler:
            torch.optim.lr_scheduler.StepLR(patched, 1)
        patched.step = functools.wraps(patched.step)(lambda *_: None)  # carries the scheduler's mark
        with raises(ValueError, "step was replaced (expected SGD.step or a scheduler's"):
            DistributedOptimizer(patched, model)


@in_ranks(1)
def test_a_scheduler_made_before_sees_the_steps(rank, world_size):
    model = DistributedDataParallel(seeded(Net))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert DistributedOptimizer(optimizer, model) is optimizer
    assert isinstance(optimizer, torch.optim.SGD)
    optimizer.step()
    scheduler.step()  # would warn that no step came before
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


class Gan(nn.Module):
    """Two networks that are trained against each other."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5))
        self.critic = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, noise: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
        fake = self.generator(noise)
        if real is None:
            return self.critic(fake).mean()
        return self.critic(real).mean() - self.critic(fake.detach()).mean()


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def optimizers_of(gan: Gan) -> list[torch.optim.Optimizer]:
    matrices = [p for p in gan.generator.parameters() if p.dim() == 2]
    vectors = [p for p in gan.generator.parameters() if p.dim() < 2]
    return [
        torch.optim.Muon(matrices, lr=0.02),
        torch.optim.AdamW(vectors, lr=0.01),
        torch.optim.RMSprop(gan.critic.parameters(), lr=0.01, momentum=0.5),
    ]


def play(wrapped: Any, optimizers: list[torch.optim.Optimizer], rank: int, turns: Iterable[int]) -> None:
    """The discriminator learns in even turns, the generator in odd ones."""
    for turn in turns:
        generator = torch.Generator().manual_seed(rank + 2 * turn)
        noise, real = torch.randn(4, 3, generator=generator), torch.randn(4, 5, generator=generator)
        wrapped.zero_grad()
        wrapped(*((noise, real), (noise,))[turn % 2]).backward()
        for optimizer in (optimizers[2:], optimizers[:2])[turn % 2]:
            optimizer.step()


def late_joiner(rank: int, world_size: int, address: str, directory: Path) -> Any:
    """Rank 1 comes late and makes its optimizers in another order; both end with the same model and states."""
    os.environ.update(PSENGINE_SERVERS=address, PSENGINE_JOB="late-gan")
    has_begun = directory / "has_begun"
    if rank == 1:
        eventually(has_begun.exists, "rank 0 has trained")
    torch.manual_seed(rank)
    gan = Gan()
    wrapped = psengine.DistributedDataParallel(gan, find_unused_parameters=True, strategy="sync-server")
    made = optimizers_of(gan)
    bound: dict[torch.optim.Optimizer, torch.optim.Optimizer] = {}
    for optimizer in made if rank == 0 else reversed(made):
        bound[optimizer] = psengine.DistributedOptimizer(optimizer, wrapped)
    optimizers = [bound[optimizer] for optimizer in made]
    start = wrapped.strategy.completed_steps
    if rank == 1:  # without which no further step ends
        (directory / f"until.{start + 60}").touch()
    while wrapped.strategy.completed_steps < min((int(p.suffix[1:]) for p in directory.glob("until.*")), default=1e9):
        # A worker that joins takes part in the very turn that the others are in.
        play(wrapped, optimizers, rank, [wrapped.strategy.completed_steps])
        has_begun.touch()
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    wrapped.leave()
    return start, values_of(gan), states


def test_a_joiner_gets_the_state_of_every_optimizer(server, tmp_path):
    (first_start, first, first_states), (start, late, states) = run_ranks(
        late_joiner, 2, server.addresses[0], tmp_path, init_group=False
    )
    assert first_start == 0
    assert start > 0
    assert all(map(torch.equal, first, late))
    for a, b in zip(first_states, states, strict=True):
        assert a.keys() == b.keys() != set()
        for index in a:
            assert all(torch.equal(a[index][name], b[index][name]) for name in a[index])


def other_optimizers(rank: int, world_size: int, address: str, directory: Path) -> None:
    os.environ.update(PSENGINE_SERVERS=address, PSENGINE_JOB="other-optimizers")
    has_begun, is_over = directory / "has_begun", directory / "is_over"
    if rank == 1:
        eventually(has_begun.exists, "rank 0 has trained")
    model = nn.Linear(4, 4)
    wrapped = psengine.DistributedDataParallel(model, strategy="sync-server")
    plain = torch.optim.SGD(model.parameters(), lr=0.1) if rank == 0 else torch.optim.Adagrad([model.weight])
    if rank == 1:
        with raises(ServerError, "expected one of SGD over 2 parameters from 'weight' on; got Adagrad over 1", "Fix: "):
            psengine.DistributedOptimizer(plain, wrapped)
        wrapped.leave()
        is_over.touch()
        return
    optimizer = psengine.DistributedOptimizer(plain, wrapped)
    while not is_over.exists():
        wrapped(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        has_begun.touch()
    # What a program makes later, all workers make: it begins anew. What it has dropped is nobody's any more.
    del optimizer, plain
    psengine.DistributedOptimizer(torch.optim.Adam(model.parameters()), wrapped)
    gc.collect()
    assert wrapped.strategy.optimizers.alive() == []
    wrapped.leave()


def test_a_joiner_whose_optimizers_are_others_is_refused(server, tmp_path):
    run_ranks(other_optimizers, 2, server.addresses[0], tmp_path, init_group=False)


@pytest.mark.parametrize("data", [b"", b"8", b"\x00" * 64])
def test_what_is_no_state_is_refused(data):
    with pytest.raises(ServerError, match="cannot be read"):
        unpack([torch.frombuffer(bytearray(data), dtype=torch.uint8)] if data else [])


def search(ranks: Iterable[int], strategy: str | None) -> tuple[int, list[torch.Tensor]]:
    """How often LBFGS evaluates the loss of these ranks' batches, and the parameters that it finds."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    optimizer: Any = torch.optim.LBFGS(model.parameters(), max_iter=6, line_search_fn="strong_wolfe")
    module, evaluations = model, 0
    if strategy is not None:
        model = DistributedDataParallel(module, strategy=strategy)
        optimizer = DistributedOptimizer(optimizer, model)
    generators = {rank: torch.Generator().manual_seed(rank) for rank in ranks}
    x = torch.cat([torch.randn(8, 4, generator=one).double() * (1 + 3 * rank) for rank, one in generators.items()])

    def closure() -> torch.Tensor:
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x.square().sum(1, keepdim=True))
        loss.backward()
        return loss

    optimizer.step(closure)
    return evaluations, list(module.parameters())


@at_servers(2)
def test_lbfgs_searches_along_the_loss_of_all_workers(rank, world_size):
    """As one process does with the whole batch (pytorch #30439)."""
    wanted = search(range(world_size), None)
    for name in ("sync", "sync-server"):
        torch.testing.assert_close(search([rank], name), wanted)
