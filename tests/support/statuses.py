"""Statuses of servers that are not there: a job of name "demo" whose workers are as the test says."""

from __future__ import annotations

from typing import Any

from psengine.parameter_server.overview import merge_jobs
from psengine.parameter_server.status_model import (
    Departed,
    MuteShard,
    ServerStatus,
    ShardJob,
    ShardStatus,
    ShardWorker,
    Transport,
    WorkerTimes,
)

APPLY_RULE = {"name": "apply", "max_staleness": None, "staleness_scaling": None, "delay_compensation": 0.0}
# Of a step of half a second: 0.2 s compute, 0.05 s apply, 0.2 s wait, 0.05 s wire.
TIMES = WorkerTimes(
    steps=10, loss=0.25, steps_per_s=2.0, samples_per_s=64.0, step_s=0.5, blocked_s=0.3, apply_s=0.05, held_s=0.2
)


def worker(rank: int, **changes: Any) -> ShardWorker:
    """A live worker in its tenth exchange, of whose steps nothing is known."""
    fields: dict[str, Any] = {
        "rank": rank, "incarnation": 1, "state": "live", "host": f"host{rank}", "pid": 100 + rank, "silent_s": 0.1,
        "pushes": 5, "refused": 0, "late": 0, "clock": 10, "waiting_for": (), "staleness": {},
    }  # fmt: skip
    return ShardWorker(**fields | changes)


def job(*workers: ShardWorker, **changes: Any) -> ShardJob:
    """An asynchronous job of three chunks."""
    fields: dict[str, Any] = {
        "rule": APPLY_RULE, "sealed": True, "started": True, "expected_workers": 2, "chunks": 3, "values_bytes": 100,
        "version_min": 4, "version_max": 9, "members": len(workers), "applied": 7, "bytes_in": 10, "bytes_out": 20,
        "workers": workers,
    }  # fmt: skip
    return ShardJob(**fields | changes)


def shard(*workers: ShardWorker, index: int = 0, name: str = "demo", **changes: Any) -> ShardStatus:
    """A shard with that job alone; ``changes`` are the job's."""
    jobs = {name: job(*workers, **changes)}
    return ShardStatus(index=index, epoch=1, memory_bytes=1, max_memory_bytes=1 << 33, transport=Transport(), jobs=jobs)


def server(*shards: ShardStatus | MuteShard, **changes: Any) -> ServerStatus:
    """A healthy server with these shards."""
    answering = [one for one in shards if isinstance(one, ShardStatus)]
    fields: dict[str, Any] = {"healthy": True, "uptime_s": 1.0, "shards": shards, "jobs": merge_jobs(answering)}
    return ServerStatus(**fields | changes)


def departed(rank: int, **changes: Any) -> Departed:
    """A worker that left."""
    fields: dict[str, Any] = {"rank": rank, "host": "h", "reason": "left", "unix_s": 5.0, "step": 3}
    return Departed(**fields | changes)
