"""Strategies "local" and "diloco": what travels within checkpoints, scalers, samples, uneven data."""

import copy
import io
from typing import Any

import pytest
import torch
from support.expectations import raises
from support.marks import slow
from support.processes import in_ranks, run_ranks
from torch import nn

import psengine
from psengine.errors import ConfigurationError

STEPS = 14


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 37), nn.BatchNorm1d(37), nn.Tanh(), nn.Linear(37, 11), nn.Linear(11, 2))


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch_of(rank, step)).square().mean()


def save_midway(rank: int, world_size: int, name: str) -> bytes:
    """A checkpoint after ten steps."""
    model, optimizer = wrapped(name)
    model.saves_strategy_state = True
    for step in range(10):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.getvalue()


TRAVELLING = "diloco:every=4,fragments=2,overlap=3,keep=0.25,compress="
LOSSY = [TRAVELLING + codec for codec in ("int8", "fp4", "topk,ratio=0.3", "bf16")]


def saved_by_one_rank(rank: int, name: str, saver: int | None) -> list[torch.Tensor]:
    """The parameters after training in which ``saver`` alone saves after each step."""
    model, optimizer = wrapped(name)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        if rank == saver:
            model.strategy.state_dict()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", [LOSSY[0], *map(slow, LOSSY[1:])])
@in_ranks(2)
def test_one_rank_alone_saves_while_a_fragment_travels(rank: int, world_size: int, name: str) -> None:
    assert all(map(torch.equal, saved_by_one_rank(rank, name, 1), saved_by_one_rank(rank, name, None)))


def resumed(rank: int, name: str, saves_at: int | None) -> list[torch.Tensor]:
    model, optimizer = wrapped(name)
    for step in range(STEPS):
        if step == saves_at:
            state = copy.deepcopy(model.state_dict()), copy.deepcopy(model.strategy.state_dict())
            model, optimizer = wrapped(name)
            model.load_state_dict(state[0])
            model.strategy.load_state_dict(state[1])
            assert any("sent" in part for part in model.strategy.state_dict()["parts"])
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@in_ranks(2)
def test_what_travels_is_sent_again_with_what_its_codec_had_left_out(rank, world_size):
    """Exactly with one residual a rank; sliced sums have a second one, which a checkpoint adds to the first."""
    for codec, tolerance in (("topk,ratio=0.3", 0.0), ("bf16", 0.0), ("int8", 2e-3)):
        own, plain = (resumed(rank, TRAVELLING + codec, saves_at) for saves_at in (10, None))
        torch.testing.assert_close(own, plain, rtol=0, atol=tolerance)


def gone_on_with(rank: int, world_size: int, state: dict[str, Any]) -> list[torch.Tensor]:
    """The parameters after some steps from ``state``, which all ranks take with the same data."""
    model, optimizer = wrapped(TRAVELLING.removesuffix(",compress="))
    model.load_state_dict(state)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, 0, step).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_what_travels_is_averaged_over_the_ranks_that_load_it():
    saved = run_ranks(save_midway, 2, TRAVELLING.removesuffix(",compress="))[0]
    state = torch.load(io.BytesIO(saved))
    assert any("sent" in part for part in state["_psengine_strategy"]["state"]["parts"])
    [alone] = run_ranks(gone_on_with, 1, state)
    for one_of_two in run_ranks(gone_on_with, 2, state):
        assert all(map(torch.equal, one_of_two, alone))


def wrapped(strategy: str, **options: Any) -> tuple[psengine.DistributedDataParallel, torch.optim.Optimizer]:
    model = psengine.DistributedDataParallel(make_model(), strategy=strategy, **options)
    return model, psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


def gathered(model: nn.Module) -> list[list[torch.Tensor]]:
    """The state of each rank's replica, by rank."""
    collective = model._collective
    return list(zip(*(collective.gather(t) for t in model.module.state_dict().values()), strict=True))


@in_ranks(2)
def test_a_round_counts_steps_that_one_ranks_scaler_leaves_out(rank, world_size):
    model, optimizer = wrapped("local:every=2")
    twin = make_model()
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        overflows = step == 2 and rank == 1
        scaler.scale(loss * (float("inf") if overflows else 1.0)).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        unchanged = all(map(torch.equal, before, model.parameters()))
        assert unchanged == overflows
        if step == 0:  # the scaled step is the plain one
            loss_of(twin, rank, step).backward()
            plain.step()
            assert all(map(torch.equal, model.parameters(), twin.parameters()))
        if step % 2:
            assert all(map(torch.equal, *gathered(model)))
    assert scaler.get_scale() == (32.0 if rank == 1 else 64.0)
    model.leave()


@in_ranks(2)
def test_samples_count_once_however_many_forwards_a_backward_has(rank, world_size):
    model, optimizer = wrapped("local:every=1")
    model.eval()  # BatchNorm1d as of one forward
    alone = copy.deepcopy(model.module)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    model.batch_weight(1.0 + rank)
    for replica, its in ((model, optimizer), (alone, plain)):
        sum(loss_of(replica, rank, step) for step in range(2 - rank)).backward()
        its.step()
    for averaged, own in zip(model.module.parameters(), alone.parameters(), strict=True):
        first, second = model._collective.gather(own)
        torch.testing.assert_close(averaged.detach(), (first + 2 * second) / 3)
    model.leave()


@in_ranks(2)
def test_uneven_data_accumulation_and_a_model_loaded_within_a_round(rank, world_size):
    model, optimizer = wrapped("local:every=2")
    parts = [0, 1] if rank == 0 else [0, 1, 2, 3, 4]
    with model.join():
        for step in parts:
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
    assert all(map(torch.equal, *gathered(model))), "join ends with one model"
    with raises(ConfigurationError, "divides by all ranks inside join", "got False"), model.join(False):
        pass
    # Five steps were counted, on both ranks; the round of the accumulated one ends here.
    with model.no_sync():
        loss_of(model, rank, 5).backward()
    loss_of(model, rank, 6).backward()
    optimizer.step()
    assert all(map(torch.equal, *gathered(model)))
    model.leave()

    # Loaded without the strategy's state in the middle of a round: the next round begins with what was loaded.
    for loads_plain_module, was_loaded_before in ((False, False), (True, False), (True, True)):
        model, optimizer = wrapped("sync" if was_loaded_before else "diloco:every=2")
        if was_loaded_before:  # with its strategy's state, under another strategy
            model.saves_strategy_state = True
            model.load_state_dict(model.state_dict())
            model.switch_strategy("diloco:every=2")
        fresh, its_optimizer = wrapped("diloco:every=2")
        loss_of(model, rank, 0).backward()
        optimizer.step()
        if loads_plain_module:
            model.module.load_state_dict(fresh.module.state_dict())
        else:
            model.load_state_dict(fresh.state_dict())
        for step in range(2):
            for one, its in ((model, optimizer), (fresh, its_optimizer)):
                its.zero_grad()
                loss_of(one, rank, step).backward()
                its.step()
        assert all(map(torch.equal, model.parameters(), fresh.parameters()))
    file = io.BytesIO()
    torch.save(model.module, file)
    file.seek(0)
    torch.load(file, weights_only=False).load_state_dict(fresh.module.state_dict())
    assert b"psengine" not in file.getvalue(), "where psengine is missing, the file can be loaded too"

    model, optimizer = wrapped("diloco:every=12,fragments=12")  # more parts than parameters
    for step in range(12):
        loss_of(model, rank, step).backward()
        optimizer.step()
    assert not all(map(torch.equal, *gathered(model))), "a part that left early went on by itself"
    model.switch_strategy("sync")
    assert all(map(torch.equal, *gathered(model))), "parameters and buffers"
