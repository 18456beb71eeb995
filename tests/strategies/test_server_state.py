"""What the server strategies save, load and carry along: state dicts, options, snapshots; and misuse of them."""

from __future__ import annotations

import copy
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from support.processes import run_ranks
from support.server_process import running_server
from support.server_training import assert_equal, at_servers, batches, build, state_of, train, use, wrap
from torch.nn import functional as F

import psengine


@at_servers(1)
def test_state_dicts_of_model_and_optimizer(rank, world_size):
    """Train, save, train on; load the checkpoint in a new job, and train on alike."""
    data = batches(0)
    wrapped = wrap(psengine.AsyncServer(job="save"))
    optimizer = psengine.DistributedOptimizer(torch.optim.Adam(wrapped.parameters(), lr=0.01), wrapped)
    train(wrapped, optimizer, data[:5])
    checkpoint = copy.deepcopy({"model": wrapped.module.state_dict(), "optimizer": optimizer.state_dict()})
    train(wrapped, optimizer, data[5:])
    straight = state_of(wrapped.module)
    wrapped.leave()

    wrapped = wrap(psengine.AsyncServer(job="load"), seed=7)
    optimizer = psengine.DistributedOptimizer(torch.optim.Adam(wrapped.parameters(), lr=0.01), wrapped)
    train(wrapped, optimizer, data[:1])
    wrapped.module.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))  # torch keeps its tensors, and steps them
    train(wrapped, optimizer, data[5:])
    assert_equal(state_of(wrapped.module), straight)
    wrapped.leave()

    plain = build(0)
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    train(plain, plain_optimizer, data[:5])
    torch.testing.assert_close(checkpoint["optimizer"], plain_optimizer.state_dict(), rtol=0, atol=0)


@at_servers(1)
def test_a_checkpoint_loaded_before_wrapping_counts_where_the_job_begins(rank, world_size):
    """Then come again, with the same checkpoint, to the servers that went on from it."""
    data = batches(0)
    plain = build(0)
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    train(plain, plain_optimizer, data[:3])
    checkpoint = copy.deepcopy({"model": plain.state_dict(), "optimizer": plain_optimizer.state_dict()})
    train(plain, plain_optimizer, data[3:])
    for part in (data[3:5], data[5:]):
        module = build(7)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))
        wrapped = psengine.DistributedDataParallel(module, strategy=psengine.AsyncServer(job="load before"))
        train(wrapped, psengine.DistributedOptimizer(optimizer, wrapped), part)
        wrapped.strategy.close()
    assert_equal(state_of(module), state_of(plain))


def configured_after_the_snapshot(rank: int, world_size: int, address: str, taken: Any, restarted: Any) -> None:
    use(address)
    wrapped = psengine.DistributedDataParallel(build(0), strategy=psengine.AsyncServer(timeout_s=30))
    wrapped.strategy.session.administer({"action": "snapshot"})
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9), wrapped)
    open(taken, "w").close()
    deadline_s = time.monotonic() + 30
    while not os.path.exists(restarted):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    plain = build(0)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for x, y in batches(0, 3):
        for model, own in ((wrapped, optimizer), (plain, plain_optimizer)):
            own.zero_grad()
            F.cross_entropy(model(x), y).backward()
            own.step()
    assert_equal(state_of(wrapped.module), state_of(plain))
    wrapped.leave()


def test_a_snapshot_may_be_older_than_the_optimizer(tmp_path):
    taken, restarted = tmp_path / "taken", tmp_path / "restarted"
    options = {"snapshot_dir": str(tmp_path / "snapshots"), "snapshot_interval_s": 0}
    with running_server(**options) as server:
        address = server.addresses[0]
        with ThreadPoolExecutor(1) as pool:
            ranks = pool.submit(
                run_ranks, configured_after_the_snapshot, 1, address, str(taken), str(restarted), init_group=False
            )
            while not taken.exists() and not ranks.done():
                time.sleep(0.05)
            server.kill()
            with running_server(bind=address, **options):
                restarted.touch()
                ranks.result(timeout=60)


@at_servers(1)
def test_a_momentum_buffer_is_saved_while_momentum_is_off(rank, world_size):
    """And what another training makes of it: ours, and torch's."""
    data = batches(0)
    results = []
    for is_ours in (True, False):
        saved: Any = None
        for job, momenta in (("first", (0.9, 0.0)), ("second", (0.9,))):
            model: Any = wrap(psengine.AsyncServer(job=job)) if is_ours else build(0)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
            optimizer = psengine.DistributedOptimizer(optimizer, model) if is_ours else optimizer
            if saved is not None:
                getattr(model, "module", model).load_state_dict(saved[1])
                optimizer.load_state_dict(copy.deepcopy(saved[0]))
            for step, momentum in enumerate(momenta):
                optimizer.param_groups[0]["momentum"] = momentum
                train(model, optimizer, data[step : step + 1])
            saved = copy.deepcopy(optimizer.state_dict()), state_of(getattr(model, "module", model))
            results.append(saved)
            if is_ours:
                model.leave()
    for (state, values), (wanted, wanted_values) in zip(results[:2], results[2:], strict=True):
        torch.testing.assert_close(state["state"], wanted["state"], rtol=0, atol=0)
        assert_equal(values, wanted_values)
