"""A worker of sync-server that loses its place in the job between two buckets of one backward."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from support.processes import run_ranks
from support.server_process import running_server

from psengine.collectives.c10d import C10dCollective
from psengine.strategies.exchange import Driver, Step
from psengine.strategies.life_cycle import Replica
from psengine.strategies.servers.sync import SyncServer
from psengine.tensors.bucket import Bucket

LEASE_S = 2.0


def enter(address: str) -> tuple[SyncServer, list[Bucket]]:
    """A strategy in service, for two parameters in a bucket each."""
    strategy = SyncServer(servers=address, timeout_s=30.0)
    parameters = {"first": torch.nn.Parameter(torch.zeros(3)), "second": torch.nn.Parameter(torch.zeros(5))}
    replica = Replica(
        parameters=parameters,
        buffers=dict,
        state={name: p.detach() for name, p in parameters.items()},
        collective=C10dCollective(),
        device=torch.device("cpu"),
    )
    strategy.prepare(replica)
    names, tensors = list(parameters), list(parameters.values())
    buckets = [Bucket(i, (i,), tensors, names, sparse=False, allocate=strategy.allocate) for i in range(2)]
    strategy.lay_out(buckets)
    strategy.join()
    return strategy, buckets


def begin(driver: Driver, bucket: Bucket, value: float) -> None:
    bucket.pack([torch.full_like(p, value) for p in bucket.parameters])
    driver.begin(bucket)


def exchange(driver: Driver, bucket: Bucket, value: float) -> float:
    begin(driver, bucket, value)
    return float(driver.result(bucket)[0])


def stopped_between_two_buckets(rank: int, world_size: int, address: str) -> list[Any]:
    strategy, buckets = enter(address)
    driver = Driver(strategy.exchange)
    store = dist.distributed_c10d._get_default_store()
    pid = torch.tensor(os.getpid())
    dist.broadcast(pid, 1)
    strategy.begin(Step(live_world_size=world_size))
    assert exchange(driver, buckets[0], rank) == 0.5
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        begin(driver, buckets[1], 20.0)
        remainder = strategy.finish()
        second = float(driver.result(buckets[1])[0])
        remainder.wait()
        assert strategy.rejoins >= 1
        [(bucket, first)] = strategy.superseded()
        assert bucket is buckets[0], "the average that was waited for before is that of an earlier step"
        results = [float(first[0]), second]
        steps = strategy.completed_steps
        store.set("rank 1 is done", "")
        strategy.close()
        return [results, steps]
    deadline = time.monotonic() + 30.0
    while strategy.session.members != (0,):
        assert time.monotonic() < deadline, "rank 1 was never evicted"
        time.sleep(0.05)
    begin(driver, buckets[1], 10.0)
    remainder = strategy.finish()
    assert driver.result(buckets[1])[0].item() == 10.0
    remainder.wait()
    os.kill(int(pid), signal.SIGCONT)
    while not store.check(["rank 1 is done"]):
        assert time.monotonic() < deadline, "rank 1 never came back"
        strategy.begin(Step(live_world_size=world_size))
        # What is waited for apart is exchanged apart, at every worker alike.
        results = [exchange(driver, one, 100.0 + strategy.completed_steps) for one in buckets]
        strategy.finish().wait()
        time.sleep(0.05)
    steps = strategy.completed_steps
    strategy.close()
    return [results, steps]


def test_a_worker_that_rejoins_between_two_buckets_waits_for_both_again():
    with running_server(lease_s=LEASE_S) as server:
        ahead, behind = run_ranks(stopped_between_two_buckets, 2, server.addresses[0])
    results, steps = behind
    assert results == [100.0 + steps - 1] * 2, "both buckets are those of the step that it took part in"
    assert steps <= ahead[1]
