"""A recommender of two towers whose servers and workers are killed: what its tables have then, beside oracles; and
what a large table takes.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks.kill_loop import Servers
from support.fault_workers import Reports, Worker, WorkerProcesses, expect_workers, results_of, worker_processes
from support.server_process import running_server
from torch import nn
from torch.nn import functional as F

import psengine
from psengine.cli.main import main

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "recipes"))

from two_tower import DIM, TwoTowers, clicks

SIZES = (3000, 500)
STEPS = 120
# A process of a worker has numbers of its own for what it contributes to steps.
MOST_STEPS, LIVES = 1000, 3
NUMBERS = 2 * LIVES * MOST_STEPS
TIMEOUT_S = 120.0


class Counted(TwoTowers):
    """Each contribution has a row of its own in a third table, from which servers take 1 / contributors."""

    def __init__(self, *tables: nn.Module) -> None:
        super().__init__(*tables[:2])
        self.counts = tables[2]

    def forward(self, number: int) -> torch.Tensor:
        """The loss of a contribution's batch."""
        users, items, clicked = clicks(*SIZES, seed=number)
        self.loss = F.binary_cross_entropy_with_logits(super().forward(users, items), clicked)
        return self.loss + self.counts(torch.tensor([number])).sum()


def train(
    reports: Reports,
    addresses: Sequence[str],
    strategy: type[Any],
    rule: str,
    optimizer: str = "adagrad",
    life: int = 0,
    dense_lr: float = 2e-3,
    steps: int = STEPS,
) -> dict[str, Any]:
    """Take ``steps`` steps, fewer if told to end; return what came of each, and of all."""
    rank = int(os.environ["PSENGINE_WORKER"])
    expect_workers(2)
    how: dict[str, Any] = {"std": 0.0, "rule": rule}
    tables = [psengine.ServerEmbedding(rows, DIM, optimizer=optimizer, lr=0.1, **how) for rows in SIZES]
    network = Counted(*tables, psengine.ServerEmbedding(NUMBERS, 1, lr=1.0, **how))
    model = psengine.DistributedDataParallel(network, strategy=strategy(servers=addresses, timeout_s=60.0))
    stepping = psengine.DistributedOptimizer(torch.optim.Adam(network.parameters(), lr=dense_lr), model)
    losses, counted, known = [], [], torch.zeros(NUMBERS)
    for step in itertools.takewhile(lambda _: reports.told() is None, range(steps)):
        model.zero_grad()
        model((rank * LIVES + life) * MOST_STEPS + step).backward()
        stepping.step()
        losses.append(network.loss.item())
        now = network.counts.rows(torch.arange(NUMBERS))[:, 0]
        counted.append((now != known).nonzero()[:, 0].tolist())
        known = now
        reports.say("step", step)
    found = {
        "losses": losses,
        "counted": counted,
        "dense": [parameter.detach().clone() for parameter in network.parameters()],
        "rows": [table.rows(torch.arange(rows)) for table, rows in zip(tables, SIZES, strict=True)],
    }
    model.leave()
    return found


@contextmanager
def training(*how: Any, lease_s: float = 60.0) -> Iterator[tuple[Servers, WorkerProcesses, list[Worker]]]:
    """Two servers that log, and two workers that train."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as context, worker_processes() as processes:
        kept = {"durability": "log", "snapshot_interval_s": 0.5, "lease_s": lease_s}
        servers = Servers(context, lambda number: {**kept, "snapshot_dir": Path(directory) / str(number)})
        workers = [processes.start(train, servers.addresses, *how, rank=rank) for rank in range(2)]
        for worker in workers:
            worker.wait_for("step", TIMEOUT_S)
        yield servers, processes, workers


def undisturbed(*how: Any) -> list[dict[str, Any]]:
    with training(*how) as (_, _, workers):
        return results_of(workers, TIMEOUT_S)


def kill_servers(servers: Servers, worker: Worker) -> None:
    """Each twice, at random moments."""
    chooser = random.Random(1)
    for number in (0, 1, 1, 0):
        time.sleep(chooser.uniform(0.0, 0.5))
        servers.kill(number)


@pytest.mark.slow
def test_killed_servers_leave_no_trace_in_averaged_rows():
    how = (psengine.SyncServer, "average")
    calm = undisturbed(*how)
    with training(*how) as (servers, _, workers):
        kill_servers(servers, workers[0])
        found = results_of(workers, TIMEOUT_S)
    for one, other in zip(found, calm, strict=True):
        assert one["losses"] == other["losses"]
        assert all(map(torch.equal, one["rows"], other["rows"]))
        assert all(map(torch.equal, one["dense"], other["dense"]))


def replayed(counted: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The rows of torch's own tables after steps to which these contributed; the dense part does not learn."""
    tables = [nn.Embedding(rows, DIM, sparse=True) for rows in SIZES]
    for table in tables:
        nn.init.zeros_(table.weight)
    twin = Counted(*tables, nn.Embedding(NUMBERS, 1))
    weights = [table.weight for table in tables]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    for numbers in counted:
        gradients = [torch.autograd.grad(twin(number), weights) for number in numbers]
        for weight, *of_ranks in zip(weights, *gradients, strict=True):
            weight.grad = functools.reduce(torch.add, [(one / len(numbers)).coalesce() for one in of_ranks]).coalesce()
        optimizer.step()
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("leases", [0, 2])
def test_rows_are_those_of_the_contributions_that_counted(leases):
    """A killed worker's last contribution counts in all tables or in none, and its next process goes on."""
    how = (psengine.SyncServer, "average", "sgd")
    with training(*how, 0, 0.0, MOST_STEPS, lease_s=3.0) as (servers, processes, workers):
        workers[1].wait_for("step", TIMEOUT_S, at_least=20)
        workers[1].kill()
        time.sleep(leases * 3.0)
        next_one = processes.start(train, servers.addresses, *how, 1, 0.0, MOST_STEPS, rank=1)
        next_one.wait_for("step", TIMEOUT_S, at_least=20)
        workers[0].go()
        found = workers[0].result(TIMEOUT_S)
    assert {len(numbers) for numbers in found["counted"]} == {1, 2}
    assert all(map(torch.equal, found["rows"], replayed(found["counted"])))


def touch(reports: Reports, address: str) -> None:
    """Push 20,000 rows of a table of 10**8."""
    table = psengine.ServerEmbedding(10**8, 64, optimizer="rowwise_adagrad", lr=0.1)
    model = nn.Sequential(table, nn.Linear(64, 1))
    wrapped = psengine.DistributedDataParallel(model, strategy=psengine.AsyncServer(servers=address))
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model[1].parameters(), lr=0.1), wrapped)
    for some in torch.arange(0, 10**8, 5000).split(4000):
        wrapped(some).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    reports.say("touched")
    reports.await_go()


def test_a_table_takes_the_memory_of_the_rows_that_were_touched(capsys):
    with running_server(shards=2) as server, worker_processes() as processes:
        worker = processes.start(touch, server.addresses[0], rank=0)
        worker.wait_for("touched", TIMEOUT_S)
        parts = server.job("default.tables")
        assert sum(part["table_rows"]["0"] for part in parts) == 20_000
        row_bytes = 4 * 64 + 4 + 32  # values, accumulator, what finds it
        assert 20_000 * 4 * 64 < sum(part["table_bytes"]["0"] for part in parts) < 1.3 * 20_000 * row_bytes
        with pytest.raises(SystemExit) as ended:
            main(["status", "--server-address", server.addresses[0]])
        assert ended.value.code in (None, 0)
        assert "table 0 of 20000 rows" in capsys.readouterr().out
