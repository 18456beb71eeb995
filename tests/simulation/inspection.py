"""What the simulation looks at in the product that is nobody's interface: all of it is here."""

from __future__ import annotations

from typing import Any

import numpy as np

from simulation.reference import Values

# ---- shards --------------------------------------------------------------------------------------------------------


def _rules(shard: Any, job: int) -> dict[int, Any]:
    """By chunk, of a job that has a view, or is being registered."""
    return shard.jobs[job].rules if job in shard.jobs else {}


def versions(shard: Any, job: int) -> dict[int, int]:
    """By chunk."""
    return {key: rule.version for key, rule in _rules(shard, job).items()}


def values(shard: Any, job: int, key: int) -> Values:
    """A copy of a chunk's."""
    rule = _rules(shard, job)[key]
    return rule.values.numpy().copy() if rule.spec.table is None else _rows(rule)  # type: ignore[no-any-return]


def _rows(rule: Any) -> Values:
    """All that a part of a table has, as ``tables.py`` lays it out."""
    ids, rows, states, stamps = (tensor.numpy() for tensor in rule.table.changed_since(-1))
    found = np.zeros((rule.spec.table.rows, 2 + rows.shape[1] + states.shape[1]))
    found[ids] = np.concatenate([np.ones((len(ids), 1)), stamps[:, None], rows, states], axis=1)
    return np.concatenate([[rule.version], found.ravel()])


def chunk_count(shard: Any, job: int) -> int:
    """How many chunks are at this shard, with values or not."""
    return len(_rules(shard, job))


def has_chunk(shard: Any, job: int, key: int) -> bool:
    """Whether a chunk is at this shard."""
    return key in _rules(shard, job)


def view_number(shard: Any, number: int) -> tuple[int, int]:
    """(registration of the job, number of the view) at a shard; 0 without one."""
    job = shard.jobs.get(number)
    return (0, 0) if job is None else (job.registration, 0 if job.view is None else job.view.number)


def members(shard: Any, number: int) -> set[tuple[int, int]]:
    """(rank, incarnation) of each member that a shard knows."""
    job = shard.jobs.get(number)
    return set() if job is None or job.view is None else {(one.rank, one.incarnation) for one in job.view.members}


def is_trained(shard: Any, number: int) -> bool:
    """Whether a shard has values of the job that nobody else has."""
    return shard.jobs[number].is_trained  # type: ignore[no-any-return]


def place(shard: Any, number: int) -> list[int]:
    """Which of how many shards of a job this is, and at how many servers, as who registers it says."""
    job = shard.jobs[number]
    return [job.place, len(job.view.shards), len(job.view.servers)]


def is_at_work(shard: Any, number: int) -> bool:
    """Whether a worker of the job is connected to a shard."""
    return bool(shard._connected(shard.jobs[number]))


def merges(shard: Any, job: int, key: int) -> tuple[int, frozenset[int]]:
    """The number of the last decision that a chunk has merged, and the numbers of those that wait to be merged."""
    rule = _rules(shard, job)[key]
    return rule.merged, frozenset(rule.due)


def knows(shard: Any, job: int, key: int, rank: int, incarnation: int, step: int) -> bool:
    """Whether a chunk that servers step has this worker's contribution, waiting or taken."""
    rule = _rules(shard, job).get(key)
    if rule is None:
        return False
    known = rule.workers.get(rank)
    if known is not None and known.incarnation == incarnation and step <= known.step:
        return True
    return (rank, incarnation, step) in waiting(shard, job, key)


def waiting(shard: Any, job: int, key: int) -> set[tuple[int, int, int]]:
    """(rank, incarnation, step) of each contribution that a chunk has, and is yet to merge."""
    here = getattr(_rules(shard, job)[key], "here", {}).values()
    return {(one.rank, one.incarnation, one.step) for one in here}


def held_weights(shard: Any, job: int, key: int, rank: int) -> Values | None:
    """What a worker holds of a chunk, by its shard's word, where answers are differences."""
    rule = _rules(shard, job).get(key)
    if rule is None or not rule.payloads.answers_differences:
        return None
    known = rule.workers.get(rank)
    return None if known is None or known.held is None else known.held.values.numpy().copy()


def shard_state(shard: Any) -> str:
    """For people."""
    is_in_view = any(view_number(shard, job)[1] for job in shard.jobs)
    return "empty" if not shard.jobs else "in a view" if is_in_view else "without a view"


def coordinator_state(server: Any) -> str:
    """Where the job stands at a server that leads it; "" elsewhere."""
    job = server.coordinators.find("job")
    if job is None or job.state.value != "open":
        return "" if job is None else "registering" if job._registrar else str(job.state.value)
    return "preparing" if job._preparing is not None else "joining" if job._joiner or job._donation else "open"


def awaits(server: Any, name: str, rank: int) -> bool:
    """Whether a job that a server leads waits for the first process of this rank."""
    job = server.coordinators.find(name)
    return job is not None and rank in job.missing


def evicted_count(server: Any, name: str) -> int:
    """How many members this life of a server has put out of a job."""
    job = server.coordinators.find(name)
    return 0 if job is None else job.evicted


def worker_state(server: Any, name: str, rank: int, incarnation: int) -> str:
    """What a job's coordinator says of a worker; "" where it does not know it."""
    job = server.coordinators.find(name)
    worker = None if job is None else job.workers.by_rank.get(rank)
    return str(worker.state.value) if worker is not None and worker.incarnation == incarnation else ""


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
