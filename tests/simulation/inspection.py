"""What the simulation looks at in the product that is nobody's interface: all of it is here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from simulation.reference import Values

# ---- shards --------------------------------------------------------------------------------------------------------


def chunks(shard: Any) -> Iterator[tuple[int, int, Values]]:
    """Of a shard whose job has a view, or is being registered: (key, version, values) of each chunk."""
    for job in shard.jobs.values():
        for key, rule in job.rules.items():
            yield key, rule.version, rule.values.numpy().copy()


def view_number(shard: Any) -> tuple[int, int]:
    """(registration of the job, number of the view) at a shard; 0 without one."""
    jobs = shard.jobs.values()
    return max(((job.registration, 0 if job.view is None else job.view.number) for job in jobs), default=(0, 0))


def last_merge(shard: Any, key: int) -> int:
    """The number of the last decision that a chunk has merged."""
    return next((job.rules[key].merged for job in shard.jobs.values() if key in job.rules), 0)


def knows(shard: Any, key: int, rank: int, incarnation: int, step: int) -> bool:
    """Whether a chunk that servers step has this worker's contribution, waiting or taken."""
    for job in shard.jobs.values():
        rule = job.rules[key]
        known = rule.workers.get(rank)
        if known is not None and known.incarnation == incarnation and step <= known.step:
            return True
        waiting = rule.here.get(rank) if hasattr(rule, "here") else None
        return waiting is not None and (waiting.incarnation, waiting.step) == (incarnation, step)
    return False


def held_weights(shard: Any, key: int, rank: int) -> Values | None:
    """What a worker holds of a chunk, by its shard's word, where answers are differences."""
    for job in shard.jobs.values():
        rule = job.rules[key]
        known = rule.workers.get(rank) if rule.payloads.answers_differences else None
        if known is not None and known.held is not None:
            return known.held.values.numpy().copy()  # type: ignore[no-any-return]
    return None


def shard_state(shard: Any) -> str:
    """For people."""
    return "empty" if not shard.jobs else "in a view" if view_number(shard)[1] else "without a view"


def coordinator_state(server: Any) -> str:
    """Where the job stands at a server that leads it; "" elsewhere."""
    job = server.coordinators.find("job")
    if job is None or job.state.value != "open":
        return "" if job is None else "registering" if job._registrar else str(job.state.value)
    return "preparing" if job._preparing is not None else "joining" if job._joiner or job._donation else "open"


def awaits(server: Any, rank: int) -> bool:
    """Whether the job that a server leads waits for the first process of this rank."""
    job = server.coordinators.find("job")
    return job is not None and rank in job.missing


def worker_state(server: Any, rank: int, incarnation: int) -> str:
    """What the coordinator of a server's only job says of a worker; "" where it does not know it."""
    for job in server.coordinators.by_number.values():
        worker = job.workers.by_rank.get(rank)
        if worker is not None and worker.incarnation == incarnation:
            return str(worker.state.value)
    return ""


# ---- workers -------------------------------------------------------------------------------------------------------


def forget_at_exit(session: Any) -> None:
    """A session that nobody closes, because its process was killed."""
    session._finalizer.detach()


def keys_at(session: Any, shard: int) -> list[int]:
    """The chunks that a session knows at a shard of the job."""
    placed = session.job_connection.chunks.shard_of
    return sorted(key for key, where in placed.items() if where == shard)


def waits_since_s(program: Any) -> float:
    """When a flow began to wait for what it waits for."""
    return program._since_s  # type: ignore[no-any-return]


def open_operations(session: Any) -> list[str]:
    """What a session waits for."""
    core = session.job_connection
    return [one.describe() for channel in core.channels for one in channel.open_operations()]
