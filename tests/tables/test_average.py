"""Rule "average": the bits of ``torch.nn.Embedding(sparse=True)`` under native DDP."""

import os
from typing import Any

import pytest
import torch
from support.processes import run_ranks
from support.server_training import at_servers, use
from support.table_training import PADDING, batch, native_optimizers, native_twin, rows_of
from support.table_training import at_servers as model_at_servers
from torch.nn.parallel import DistributedDataParallel as NativeDDP

import psengine
from psengine.errors import ServerRefusedError

STEPS = 6


def trained_like_native(
    rank: int, world_size: int, address: str, optimizer: str, mode: str, strategy: str, accumulates: bool
) -> None:
    use(address)
    os.environ["PSENGINE_JOB"] = f"{optimizer} {mode} {strategy} {world_size} {accumulates}"
    ours = model_at_servers(optimizer, mode=mode)
    wrapped = psengine.DistributedDataParallel(ours, strategy=strategy)
    twin = native_twin(ours)
    native = NativeDDP(twin)
    step_ours = psengine.DistributedOptimizer(torch.optim.Adam(ours.head.parameters(), lr=0.01), wrapped)
    steps_native = native_optimizers(twin, optimizer)
    for step in range(STEPS):
        losses = []
        # Schedulers change the rate between two steps.
        lr = 0.1 / (1 + step)
        ours.users.lr = ours.items.lr = steps_native[1].param_groups[0]["lr"] = lr
        for model, optimizers in ((wrapped, [step_ours]), (native, steps_native)):
            for one in optimizers:
                one.zero_grad()
            if accumulates:
                with model.no_sync():
                    model(*batch(rank, 100 + step)).backward()
            loss = model(*batch(rank, step))
            loss.backward()
            for one in optimizers:
                one.step()
            losses.append(loss.item())
        assert losses[0] == losses[1], (step, losses)
        for got, wanted in zip(rows_of(ours), (twin.users.weight, twin.items.weight), strict=True):
            assert torch.equal(got, wanted), (step, (got - wanted).abs().max())
    for got, wanted in zip(ours.head.parameters(), twin.head.parameters(), strict=True):
        assert torch.equal(got, wanted)
    wrapped.leave()


@pytest.mark.parametrize(
    ("optimizer", "mode", "strategy", "world_size", "accumulates"),
    [
        ("sgd", "sum", "sync", 2, False),
        ("sgd", "mean", "sync", 3, True),
        ("adagrad", "mean", "sync-server", 2, True),
        ("adagrad", "sum", "sync", 3, False),
    ],
)
def test_training_has_native_ddp_s_bits(server, optimizer, mode, strategy, world_size, accumulates):
    """Rows that several workers have, and several times; a worker without rows; two forwards of a table in a step."""
    address = server.addresses[0]
    run_ranks(trained_like_native, world_size, address, optimizer, mode, strategy, accumulates)


@at_servers(2)
def test_a_step_that_a_scaler_leaves_out_moves_nothing_and_scaled_gradients_have_their_size(rank, world_size):
    ours = model_at_servers("sgd")
    wrapped = psengine.DistributedDataParallel(ours)
    twin = native_twin(ours)
    native = NativeDDP(twin)
    optimizer = psengine.DistributedOptimizer(torch.optim.Adam(ours.head.parameters(), lr=0.01), wrapped)
    dense, tables = native_optimizers(twin, "sgd")
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
    for step in range(1, 6):
        for scaler, model, optimizers in zip(scalers, (wrapped, native), ([optimizer], [dense, tables]), strict=True):
            for one in optimizers:
                one.zero_grad()
            loss = model(*batch(rank, step))
            if step == 2:  # in which rank 1 has no rows
                loss = loss * torch.tensor(float("inf"))
            if (rank, step) == (1, 3):  # gradients overflow in one table of one rank
                loss = loss + 1e38 * model.module.users(batch(rank, step)[0]).sum()
            scaler.scale(loss).backward()
            if step > 3:
                scaler.unscale_(optimizers[0])
                torch.nn.utils.clip_grad_norm_(model.module.head.parameters(), 0.1)
            for one in optimizers:
                scaler.step(one)
            scaler.update()
        for got, wanted in zip(rows_of(ours), (twin.users.weight, twin.items.weight), strict=True):
            assert torch.equal(got, wanted), (step, (got - wanted).abs().max())
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0**8
    wrapped.leave()


def with_another_lr(rank: int, world_size: int, address: str) -> str:
    use(address)
    os.environ["PSENGINE_JOB"] = "rates"
    ours = model_at_servers("sgd")
    wrapped = psengine.DistributedDataParallel(ours, strategy="sync-server")
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(ours.head.parameters(), lr=0.1), wrapped)
    refusal = ""
    for ours.items.lr in (0.1, 0.1 + 0.1 * rank):
        wrapped(*batch(rank, 1)).backward()
        try:
            optimizer.step()
        except ServerRefusedError as error:
            refusal = str(error)
        optimizer.zero_grad()
    wrapped.leave()
    return refusal


def test_workers_with_other_learning_rates_are_refused_by_value(server):
    refusals = [text for text in run_ranks(with_another_lr, 2, server.addresses[0]) if text]
    assert refusals
    for text in refusals:
        assert "'items'" in text
        assert (
            "(expected 0.1 as of worker 0, got 0.2 of worker 1)" in text or "(expected 0.2 as of worker 1, got" in text
        )
        assert "Fix: set the table's lr on all workers alike" in text


@at_servers(2)
def test_who_drops_gradients_alone_is_not_waited_for(rank, world_size):
    """The others' rows of that step count alone, and later steps are of the same step of all."""
    ours = model_at_servers("sgd")
    wrapped = psengine.DistributedDataParallel(ours)
    optimizer = psengine.DistributedOptimizer(torch.optim.Adam(ours.head.parameters(), lr=0.0), wrapped)
    before = rows_of(ours)
    wrapped(*batch(rank, 1)).backward()
    if rank == 1:
        wrapped.zero_grad()
    else:
        optimizer.step()
    after = rows_of(ours)
    changed = [(one != other).any(dim=1) for one, other in zip(before, after, strict=True)]
    ids, history, _ = batch(0, 1)
    assert changed[0].nonzero().flatten().tolist() == sorted({*ids.tolist(), *(ids // 2).tolist()} - {PADDING})
    assert changed[1].nonzero().flatten().tolist() == sorted(set(history.tolist()))
    wrapped.leave()


def one_step(rank: int, world_size: int, address: str) -> Any:
    use(address)
    os.environ["PSENGINE_JOB"] = "several runs"
    ours = model_at_servers("sgd")
    wrapped = psengine.DistributedDataParallel(ours)
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(ours.head.parameters(), lr=0.0), wrapped)
    before = rows_of(ours)
    torch.distributed.barrier()
    wrapped(*batch(rank, 0)).backward()
    optimizer.step()
    after = rows_of(ours)
    wrapped.leave()
    return before, after


def test_the_next_run_goes_on_with_another_number_of_workers(server):
    rows = None
    for workers in (2, 1, 3):
        found = run_ranks(one_step, workers, server.addresses[0])
        for before, after in found:
            assert rows is None or all(map(torch.equal, before, rows))
            assert all(map(torch.equal, after, found[0][1]))
        rows = found[0][1]
