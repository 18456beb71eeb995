"""Optimizers whose state was loaded before a model was wrapped, or made after the servers' snapshot."""

import copy
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from support.processes import run_ranks
from support.server_process import running_server
from support.server_training import assert_equal, at_servers, batches, build, network, state_of, train, use
from support.waiting import eventually
from torch.nn import functional as F

import psengine


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
    wrapped = psengine.DistributedDataParallel(build(0), strategy=psengine.AsyncServer(timeout_s=60))
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9), wrapped)
    open(taken, "w").close()
    eventually(lambda: os.path.exists(restarted))
    plain = build(0)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for x, y in batches(0, 3):
        for model, own in ((wrapped, optimizer), (plain, plain_optimizer)):
            own.zero_grad()
            F.cross_entropy(model(x), y).backward()
            own.step()
    assert_equal(state_of(wrapped.module), state_of(plain))
    wrapped.leave()


def test_the_first_snapshot_is_there_before_the_first_step_and_older_than_the_optimizer(tmp_path):
    taken, restarted = tmp_path / "taken", tmp_path / "restarted"
    options = {"snapshot_dir": str(tmp_path / "snapshots"), "snapshot_interval_s": 0}
    with running_server(**options) as server:
        address = server.addresses[0]
        with ThreadPoolExecutor(1) as pool:
            ranks = pool.submit(
                run_ranks, configured_after_the_snapshot, 1, address, str(taken), str(restarted), init_group=False
            )
            eventually(lambda: taken.exists() or ranks.done())
            server.kill()
            with running_server(bind=address, **options):
                restarted.touch()
                ranks.result()


@at_servers(3)
def test_a_checkpoint_loaded_after_wrapping_is_trained_from_by_all(rank, world_size):
    for strategy in ("async", "diloco-server:every=1,grace=0,outer_lr=1,outer_momentum=0"):
        load_after_wrapping(rank, strategy)


def load_after_wrapping(rank: int, strategy: str) -> None:
    os.environ["PSENGINE_JOB"] = f"load after {strategy[:5]}"
    checkpoint = network().state_dict()
    module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    wrapped = psengine.DistributedDataParallel(module, strategy=strategy)
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=1.0), wrapped)
    if rank == 0:  # it comes last: the others may train what the servers have from the beginning
        until_s = time.monotonic() + 2
        while not wrapped.statistics().updates and time.monotonic() < until_s:
            time.sleep(0.05)
    wrapped.load_state_dict({f"module.{name}": value for name, value in checkpoint.items()})
    # The same gradient everywhere, whatever the weights.
    torch.nn.utils.parameters_to_vector(wrapped.parameters()).sum().mul(0.125).backward()
    optimizer.step()
    psengine.barrier()
    wrapped.strategy.pull_values()
    version = wrapped.strategy.session.pull(wrapped.strategy.chunks.specs[0].key).wait().version
    steps = version - 1  # worker 0's values were one
    assert steps == 3 if strategy == "async" else 1 <= steps <= 2, steps
    for name, value in checkpoint.items():
        torch.testing.assert_close(module.state_dict()[name], value - 0.125 * steps)
    wrapped.leave()


class Tied(torch.nn.Module):
    def __init__(self, sets_head: bool = True) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9, bias=False)
        if sets_head:
            self.head.weight = self.embedding.weight
        self.empty = torch.nn.Parameter(torch.empty(0, 4))
        self.register_buffer("mask", torch.ones(9), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids)) * self.mask + self.empty.sum()


@at_servers(1)
def test_a_reader_pulls_what_load_state_dict_takes(rank, world_size):
    """transformers models, whose head is their embedding."""
    module = Tied()
    wrapped = psengine.DistributedDataParallel(module, strategy=psengine.AsyncServer(job="tied"))
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), wrapped)
    F.cross_entropy(wrapped(torch.arange(8)), torch.arange(1, 9)).backward()
    optimizer.step()
    with psengine.connect(job="tied", role="reader") as reader:
        Tied().load_state_dict(pulled := reader.pull())
        assert_equal(pulled, state_of(module))
        fresh = Tied(sets_head=False)
        reader.pull(into=fresh.state_dict())
    assert_equal(state_of(fresh), state_of(module))
    wrapped.leave()
