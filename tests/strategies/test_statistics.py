"""``model.statistics()``, ``model.leave()`` and a worker's number, under each strategy; servers named in its text."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.expectations import raises
from support.processes import in_ranks, run_ranks
from support.server_process import running_server
from support.server_training import batches, build, train
from support.waiting import eventually

import psengine
from psengine.errors import ReductionError


def wrapped_with(strategy: str, seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    model = psengine.DistributedDataParallel(build(seed), strategy=strategy)
    return model, psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)


@in_ranks(2)
def test_without_servers(rank, world_size):
    model, optimizer = wrapped_with("sync")
    x, y = batches(rank)[0]
    assert model.statistics() == psengine.Statistics(strategy="sync", worker=rank, live_workers=(0, 1))
    train(model, optimizer, batches(rank, 3))
    with model.no_sync():
        model(x).sum().backward()  # exchanged later
    assert model.statistics().steps == 3
    model.leave()
    model.leave()
    assert model.statistics().steps == 3
    assert model.module(x).shape == (4, 7)
    with raises(ReductionError, "serves no model"):
        torch.nn.functional.cross_entropy(model(x), y).backward()


@pytest.fixture(scope="module")
def two_servers():
    with running_server() as one, running_server() as other:
        yield one.addresses[0], other.addresses[0]


@pytest.mark.parametrize(("strategy", "count"), [("async", 2), ("sync-server", 2), ("async", 1)])
@in_ranks(2)
def test_servers_named_in_the_strategy_count(
    rank: int, world_size: int, two_servers: tuple[str, str], strategy: str, count: int
) -> None:
    os.environ.pop("PSENGINE_SERVERS", None)
    assert all(address.startswith("tcp://") for address in two_servers)
    model, optimizer = wrapped_with(f"{strategy}:servers={','.join(two_servers[:count])},job={strategy}{count}")
    train(model, optimizer, batches(rank, 4))
    torch.distributed.barrier()
    found = model.statistics()
    torch.distributed.barrier()
    model.leave()
    with raises(ReductionError, "before model.leave()"):
        model.statistics()
    assert (found.strategy, found.job, found.steps) == (strategy, f"{strategy}{count}", 4)
    assert (found.worker, found.live_workers) == (rank, (0, 1))
    # A push of a chunk is as large as its answer; the model came to the servers from one worker.
    numel = sum(p.numel() for p in build(0).parameters() if p.requires_grad)
    assert found.bytes_sent > 2 * 4 * 4 * numel
    assert found.bytes_received > 2 * 4 * 4 * numel
    assert found.updates >= 2 * 4
    if strategy == "async":
        assert sum(found.staleness.values()) == found.updates
        assert min(found.staleness) >= 0
    else:
        assert set(found.staleness) <= {0}


def meet(folder: Path, rank: int, place: str) -> None:
    """Wait for the other process, without a process group."""
    (folder / f"{place}-{rank}").touch()
    eventually((folder / f"{place}-{1 - rank}").exists, timeout_s=60.0)


def numbered(rank: int, world_size: int, address: str, folder: Path) -> Any:
    """A lone process: the servers number it in ``init``."""
    os.environ.update(PSENGINE_SERVERS=address, PSENGINE_JOB="numbered")
    for name in ("PSENGINE_WORKER", "PSENGINE_WORKERS"):
        os.environ.pop(name, None)
    context = psengine.init()
    before = context.worker
    model, optimizer = wrapped_with("async", seed=rank)
    meet(folder, rank, "wrapped")
    assert model.statistics().live_workers == (0, 1)
    meet(folder, rank, "seen")
    after, main = context.worker, psengine.is_main_process()
    train(model, optimizer, batches(rank, 1))
    assert model.statistics().worker == after
    os.environ["PSENGINE_WORKERS"] = "2"
    workers = context.workers
    model.leave()
    assert context.worker == after, "it stays the process's number"
    return before, after, main, workers


def test_servers_number_workers_that_have_no_number(two_servers, tmp_path):
    results = run_ranks(numbered, 2, two_servers[0], tmp_path, init_group=False)
    assert sorted(results) == [(0, 0, True, 2), (1, 1, False, 2)]


@in_ranks(2, init_group=False)
def test_an_independent_worker_has_its_number_at_the_servers_and_its_part_of_the_data(rank, world_size, two_servers):
    os.environ.update(PSENGINE_SERVERS=two_servers[0], PSENGINE_JOB="independent")
    os.environ.update(PSENGINE_WORKER=str(1 - rank), PSENGINE_WORKERS="2")
    context = psengine.init()
    model, optimizer = wrapped_with("async", seed=rank)
    train(model, optimizer, batches(rank, 1))
    assert (context.rank, context.worker, model.statistics().worker) == (0, 1 - rank, 1 - rank)
    assert len(psengine.ProportionalSampler(range(10))) == 5
    assert len(psengine.EvaluationSampler(range(10))) == 10
    model.leave()
