"""A group's sums at servers, without its workers: which averages count, and what servers keep of a former group."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.server_process import running_server
from support.waiting import eventually

from psengine.collectives.solo import SoloCollective
from psengine.errors import CollectiveError
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.worker_session import WorkerSession
from psengine.strategies.elastic.server_sums import ServerSums

OWNERS = [(0, 0), (0, 1), (1, 0)]


def member(address: str, rank: int) -> tuple[ServerSums, torch.Tensor]:
    """One of two, and its bucket's memory; contribution v is v + 1."""
    inner = SoloCollective()
    inner.rank = rank
    sums = ServerSums(inner, SessionOptions(addresses=[address]), len(OWNERS), 7)
    mine = [virtual_worker for virtual_worker, (owner, _) in enumerate(OWNERS) if owner == rank]
    memory = sums.allocate((1 + len(mine)) * 2, torch.float32, torch.device("cpu")).view(-1, 2)
    for row, virtual_worker in enumerate(mine, 1):
        memory[row] = virtual_worker + 1
    return sums, memory


def run_sum(sums: ServerSums, memory: torch.Tensor) -> list[float]:
    for work in sums.sum_contributions(memory, OWNERS):
        work.wait()
    return memory[0].tolist()


def test_an_average_without_a_virtual_worker_does_not_count():
    with running_server(lease_s=2.0) as server, WorkerSession(SessionOptions(addresses=server.addresses)) as operator:
        members = [member(server.addresses[0], rank) for rank in (0, 1)]
        with ThreadPoolExecutor() as pool:
            assert list(pool.map(run_sum, *zip(*members, strict=True))) == [[2.0, 2.0], [2.0, 2.0]]
        (first, memory), (second, _) = members
        operator.administer({"action": "evict", "job": "default.sums.3", "worker": 2})
        with pytest.raises(CollectiveError, match="expected 3 contributions, got 2"):
            run_sum(first, memory)
        assert memory[0].tolist() == [2.0, 2.0], "others may still lack it"
        first.abandon()
        second.abandon()
        eventually(lambda: operator.status()[0]["memory_bytes"] == 0, "the job is over, and its averages are dropped")
