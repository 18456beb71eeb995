"""Statuses of servers that are not there: a job of name "demo" whose workers are as the test says."""

from dataclasses import fields
from typing import Any, NamedTuple

from psengine.status_port.overview import merge_jobs
from psengine.status_port.status_model import (
    CoordinatedJob,
    CoordinatedWorker,
    Departed,
    ServerStatus,
    ShardJob,
    ShardStatus,
    ShardWorker,
    Transport,
)
from support.shard_world import APPLY

TIMES = {
    "steps": 10, "loss": 0.25, "steps_per_s": 2.0, "samples_per_s": 64.0, "step_s": 0.5, "compute_s": 0.2,
    "blocked_s": 0.3,
}  # fmt: skip


class Worker(NamedTuple):
    """A worker as a shard sees it, and as the coordinator does."""

    here: ShardWorker
    led: CoordinatedWorker


def worker(rank: int, **changes: Any) -> Worker:
    """A live worker in its tenth step, of whose times nothing is known."""
    here = {"rank": rank, "pushes": 5, "step": 10}
    led = {"rank": rank, "state": "live", "host": f"host{rank}", "pid": 100 + rank, "silent_s": 0.1}
    return Worker(
        ShardWorker(**here | _of(ShardWorker, changes)), CoordinatedWorker(**led | _of(CoordinatedWorker, changes))
    )


def shard(*workers: Worker, index: int = 0, name: str = "demo", **changes: Any) -> ShardStatus:
    """A shard with an asynchronous job of three chunks alone, led by the first shard; ``changes`` are the job's."""
    here: dict[str, Any] = {
        "rule": APPLY, "chunks": 3, "values_bytes": 100, "version_min": 4, "version_max": 9,
        "members": len(workers), "applied": 7, "bytes_in": 10, "bytes_out": 20,
        "workers": tuple(one.here for one in workers),
    }  # fmt: skip
    led = {
        "rule": APPLY,
        "expected_workers": 2,
        "workers": tuple(one.led for one in workers),
    }
    jobs = {name: ShardJob(**here | _of(ShardJob, changes))}
    coordinated = {} if index else {name: CoordinatedJob(**led | _of(CoordinatedJob, changes))}
    sizes = {"memory_bytes": 1, "max_memory_bytes": 1 << 33}
    return ShardStatus(index=index, epoch=1, transport=Transport(), jobs=jobs, coordinated=coordinated, **sizes)


def _of(model: type, changes: dict[str, Any]) -> dict[str, Any]:
    names = {one.name for one in fields(model)}
    return {name: value for name, value in changes.items() if name in names}


def server(*shards: ShardStatus, **changes: Any) -> ServerStatus:
    """A healthy server with these shards."""
    answering = [one for one in shards if not one.error]
    given: dict[str, Any] = {"healthy": True, "uptime_s": 1.0, "shards": shards, "jobs": merge_jobs(answering)}
    return ServerStatus(**given | changes)


def departed(rank: int, **changes: Any) -> Departed:
    """A worker that left."""
    given: dict[str, Any] = {"rank": rank, "host": "h", "reason": "left", "unix_s": 5.0, "step": 3}
    return Departed(**given | changes)
