"""Operators' orders (ADMIN): write a snapshot, end a worker's lease, forget a job, drain the server, shut it down.

A shard's thread checks who sends an order. It is performed here, in threads of its own: it asks the shards, which must
not wait for themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from psengine.errors import ProtocolError
from psengine.parameter_server.server.durability.snapshot_thread import SnapshotOutcome
from psengine.parameter_server.server.shard_group import ShardGroup
from psengine.protocol.messages import ErrorCode

# Less than an operator waits; a snapshot that takes longer is written all the same.
SNAPSHOT_WAIT_S = 6.0

BeginSnapshot = Callable[[], Future[SnapshotOutcome]]


def perform(
    body: dict[str, Any], shards: ShardGroup, begin_snapshot: BeginSnapshot | None, drain: Callable[[], int]
) -> str:
    """Perform the order of an ADMIN's body; what came of it. "shutdown" is the caller's to do, after the answer.

    Args:
        body: ADMIN's.
        shards: of the server.
        begin_snapshot: None where the server keeps none.
        drain: lets no more workers in, and ends the server once the last one has left; how many there are now.

    Raises:
        ProtocolError: it was refused, or there is no such job or worker.
    """
    action, given = body["action"], {name: value for name, value in body.items() if name != "action"}
    needed = {"evict": {"job", "worker"}, "forget": {"job"}}.get(action, set())
    if set(given) != needed:
        wanted, got = (", ".join(sorted(names)) or "none" for names in (needed, given))
        raise ProtocolError(f"{action} has other parameters (expected {wanted}, got {got})")
    if action == "snapshot":
        return _write_snapshot(begin_snapshot)
    if action == "evict":
        return _end_lease(shards, body["job"], body["worker"])
    if action == "forget":
        return _forget_job(shards, body["job"], begin_snapshot or (lambda: None))
    if action == "drain":
        return _begin_drain(drain)
    return "The server shuts down: it answers what is queued, and writes a snapshot if it keeps any."


def _write_snapshot(begin_snapshot: BeginSnapshot | None) -> str:
    if begin_snapshot is None:
        raise ProtocolError("this server keeps no snapshots (expected a --snapshot-dir)", ErrorCode.SNAPSHOT_FAILED)
    try:
        outcome = begin_snapshot().result(SNAPSHOT_WAIT_S)
    except FutureTimeoutError:
        return f"The snapshot is being written; it takes longer than {SNAPSHOT_WAIT_S:g} s."
    if outcome.error:
        raise ProtocolError(f"no snapshot was written: {outcome.error}", ErrorCode.SNAPSHOT_FAILED)
    return f"Durable to generation {outcome.generation}."


def _end_lease(shards: ShardGroup, job: str, worker: int) -> str:
    try:
        if not shards.evict(job, worker):
            raise ProtocolError(
                f"there is no worker {worker} in job {job!r}, or another server leads it (the first of the job's list)",
                ErrorCode.UNKNOWN_JOB,
            )
    except FutureTimeoutError:
        return "A shard is busy; it ends the lease as soon as it can."
    return f"Worker {worker} is out. If its process lives, it says HELLO again and comes back."


def _forget_job(shards: ShardGroup, job: str, begin_snapshot: Callable[[], object]) -> str:
    try:
        workers = shards.forget(job, begin_snapshot)
    except FutureTimeoutError:
        raise ProtocolError(
            "a shard is busy and did not answer in time. Fix: ask again until the job is gone", ErrorCode.NOT_READY
        ) from None
    if workers is None:
        raise ProtocolError(f"there is no job {job!r}", ErrorCode.UNKNOWN_JOB)
    if workers:
        raise ProtocolError(
            f"job {job!r} is in use (expected no workers, got {workers}). Fix: end them, or their leases (psengine"
            " admin evict); a worker that died counts until its lease is over",
            ErrorCode.NOT_READY,
        )
    return f"Job {job!r} is forgotten: its values, and its place among the server's jobs."


def _begin_drain(drain: Callable[[], int]) -> str:
    try:
        count = drain()
    except FutureTimeoutError:
        return "The server drains. A shard is busy; it lets no more workers in as soon as it can."
    end = f"It ends when the last of {count} has left." if count else "There is none: it ends now."
    return f"The server lets no more workers in. {end}"
