"""Several shards' statuses of a job, merged into one ``JobStatus``. Pure.

The parts of a worker's step::

    step_s = compute_s + blocked_s            the worker's own clock
             blocked_s = apply_s + wait_s + wire_s
                         apply_s   servers work on this step's gradients; shards work side by side: the slowest counts
                         wait_s    servers hold the answer until other workers are as far
                         wire_s    the rest: network, queues, copies
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, get_args

from psengine.parameter_server.status_model import (
    Counts,
    JobCounters,
    JobStatus,
    ShardJob,
    ShardStatus,
    ShardWorker,
    State,
    WorkerStatus,
    WorkerTimes,
    added,
)

_STRATEGIES = {"average": "sync-server", "apply": "async", "merge": "diloco-server"}
# From the best to the worst.
_STATES: tuple[str, ...] = get_args(State)


def merge_jobs(shards: Iterable[ShardStatus]) -> dict[str, JobStatus]:
    """One view per job, by name.

    Args:
        shards: those of one or several servers that answered, the lead first.
    """
    parts: dict[str, list[ShardJob]] = {}
    for shard in shards:
        for name, part in shard.jobs.items():
            parts.setdefault(name, []).append(part)
    return {name: _merge_job(of_job) for name, of_job in sorted(parts.items())}


def _merge_job(parts: Sequence[ShardJob]) -> JobStatus:
    lead = parts[0]
    # A shard with fewer chunks than others may have none.
    trained = [part for part in parts if part.chunks]
    workers = _merge_workers(parts)
    return JobStatus(
        rule=lead.rule,
        rule_text=rule_text(lead.rule),
        kind=_kind(lead.rule),
        members=len(workers),
        version_min=min((part.version_min for part in trained), default=0),
        version_max=max((part.version_max for part in trained), default=0),
        departed=lead.departed,
        workers=workers,
        **_merged(JobCounters, parts),
    )


def _merged(model: type, parts: Sequence[Any]) -> dict[str, Any]:
    """The fields of ``model`` that say how the shards' values are merged."""
    return {
        one.name: one.metadata["merge"](getattr(part, one.name) for part in parts)
        for one in fields(model)
        if "merge" in one.metadata
    }


def _merge_workers(parts: Sequence[ShardJob]) -> tuple[WorkerStatus, ...]:
    seen: dict[int, list[ShardWorker]] = {}
    for part in parts:
        for worker in part.workers:
            seen.setdefault(worker.rank, []).append(worker)
    steps = {rank: _most(part.clock for part in of_worker) for rank, of_worker in seen.items()}
    lags: dict[int, int] = {}
    if all(step is None for step in steps.values()):
        steps = {rank: _most(part.telemetry.steps for part in of_worker) for rank, of_worker in seen.items()}
    else:
        in_step = {rank: step for rank, step in steps.items() if step is not None and _state(seen[rank]) != "joining"}
        fastest = max(in_step.values(), default=0)
        lags = {rank: fastest - step for rank, step in in_step.items()}
    waits = [{rank for part in of_worker for rank in part.waiting_for} for of_worker in seen.values()]
    awaited_by = {rank: sum(rank in wait for wait in waits) for rank in seen}
    return tuple(
        _merge_worker(rank, seen[rank], steps[rank], lags.get(rank), awaited_by[rank]) for rank in sorted(seen)
    )


def _merge_worker(
    rank: int, parts: Sequence[ShardWorker], step: int | None, lag: int | None, awaited_by: int
) -> WorkerStatus:
    staleness = added(part.staleness for part in parts)
    # Each shard hears the same heartbeats, but a restarted one knows fewer.
    told = next((part.telemetry for part in parts if part.telemetry.steps is not None), WorkerTimes())
    return WorkerStatus(
        rank=rank,
        state=_state(parts),
        host=parts[0].host,
        pid=parts[0].pid,
        step=step,
        lag=lag,
        staleness_p50=percentile(staleness, 0.5),
        staleness_p99=percentile(staleness, 0.99),
        waiting_for=tuple(sorted({other for part in parts for other in part.waiting_for})),
        awaited_by=awaited_by,
        loss=told.loss,
        samples_per_s=told.samples_per_s,
        steps_per_s=told.steps_per_s,
        step_s=told.step_s,
        **_merged(WorkerStatus, parts),
        **_split(told, [part.telemetry for part in parts]),
    )


def _state(parts: Sequence[ShardWorker]) -> State:
    """The worst state at any shard."""
    return max((part.state for part in parts), key=_STATES.index)


def _split(told: WorkerTimes, parts: Sequence[WorkerTimes]) -> dict[str, Any]:
    """The parts of a step."""
    if told.step_s is None or told.blocked_s is None:
        return dict.fromkeys(("compute_s", "wait_s", "wire_s", "apply_s"))
    blocked_s = min(told.blocked_s, told.step_s)
    apply_s = min(blocked_s, max(part.apply_s or 0.0 for part in parts))
    wait_s = min(blocked_s - apply_s, max(part.held_s or 0.0 for part in parts))
    return {
        "compute_s": round(told.step_s - blocked_s, 6),
        "wait_s": round(wait_s, 6),
        "wire_s": round(blocked_s - apply_s - wait_s, 6),
        "apply_s": round(apply_s, 6),
    }


def owns_weights(rule: Mapping[str, Any]) -> bool:
    """Whether a job of this rule keeps its weights at the servers; where gradients are averaged, workers have them."""
    return str(rule["name"]) != "average"


def rule_text(rule: Mapping[str, Any]) -> str:
    """A rule as users write it: the strategy's name and the options that are set, such as "async:max_staleness=2"."""
    options = [
        f"{name}={str(value).replace(':', ',')}"  # options of a codec are written like the strategy's own
        for name, value in rule.items()
        # 0 is a value of these two; of other options it means that there is no such thing.
        if name != "name" and (value or (name in ("max_staleness", "compensation_decay") and value is not None))
    ]
    return ":".join([_kind(rule), ",".join(options)] if options else [_kind(rule)])


def _kind(rule: Mapping[str, Any]) -> str:
    return _STRATEGIES.get(rule["name"], str(rule["name"]))


def percentile(counts: Counts, share: float) -> int | None:
    """The smallest number that at least ``share`` of the counted ones do not exceed; None of nothing."""
    total = sum(counts.values())
    reached = 0
    for number, count in added([counts]).items():
        reached += count
        if reached >= share * total:
            return int(number)
    return None


def _most(numbers: Iterable[int | None]) -> int | None:
    return max((number for number in numbers if number is not None), default=None)
