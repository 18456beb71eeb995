"""The statuses of a job, of its coordinator and its shards, merged into one ``JobStatus``. Pure.

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
from typing import Any

from psengine.parameter_server.status_model import (
    CoordinatedJob,
    CoordinatedWorker,
    Counts,
    JobCounters,
    JobFacts,
    JobStatus,
    ShardJob,
    ShardStatus,
    ShardWorker,
    WorkerStatus,
    WorkerTimes,
    added,
)

_STRATEGIES = {"average": "sync-server", "apply": "async", "merge": "diloco-server"}


def merge_jobs(shards: Iterable[ShardStatus]) -> dict[str, JobStatus]:
    """One view per job, by name.

    Args:
        shards: those of one or several servers that answered, the lead first.
    """
    parts: dict[str, list[ShardJob]] = {}
    led: dict[str, CoordinatedJob] = {}
    for shard in shards:
        for name, part in shard.jobs.items():
            parts.setdefault(name, []).append(part)
        led |= {name: job for name, job in shard.coordinated.items() if name not in led}
    return {name: _merge_job(led.get(name), parts.get(name, [])) for name in sorted({*led, *parts})}


def _merge_job(led: CoordinatedJob | None, parts: Sequence[ShardJob]) -> JobStatus:
    """``led``: None where the job's lead was not asked."""
    if led is None:
        seen = {worker.rank: worker for part in parts for worker in part.workers}
        led = CoordinatedJob(rule=parts[0].rule, workers=tuple(map(_unknown, seen.values())))
    # A shard with fewer chunks than others may have none.
    trained = [part for part in parts if part.chunks]
    workers = _merge_workers(led.workers, parts)
    # Only a job that has ended, or of which ranks are reserved, has no rule: it owns no weights.
    rule = led.rule or next((part.rule for part in parts), {"name": "average"})
    return JobStatus(
        rule=rule,
        rule_text=rule_text(rule),
        kind=_kind(rule),
        members=len(workers),
        version_min=min((part.version_min for part in trained), default=0),
        version_max=max((part.version_max for part in trained), default=0),
        workers=workers,
        **_same(led, *(one.name for one in fields(JobFacts))),
        **{
            one.name: one.metadata["merge"](getattr(part, one.name) for part in parts)
            for one in fields(JobCounters)
            if parts and "merge" in one.metadata
        },
    )


def _unknown(worker: ShardWorker) -> CoordinatedWorker:
    return CoordinatedWorker(
        rank=worker.rank, incarnation=worker.incarnation, state="live", host="", pid=0, silent_s=0.0
    )


def _merge_workers(led: Sequence[CoordinatedWorker], parts: Sequence[ShardJob]) -> tuple[WorkerStatus, ...]:
    led = sorted(led, key=lambda one: one.rank)
    seen: dict[int, list[ShardWorker]] = {one.rank: [] for one in led}
    for part in parts:
        for worker in part.workers:
            if worker.rank in seen:
                seen[worker.rank].append(worker)
    steps = {rank: _most(part.clock for part in of_worker) for rank, of_worker in seen.items()}
    lags: dict[int, int] = {}
    if all(step is None for step in steps.values()):
        steps = {one.rank: one.telemetry.steps for one in led}
    else:
        in_step = {one.rank: step for one in led if (step := steps[one.rank]) is not None and one.state != "joining"}
        fastest = max(in_step.values(), default=0)
        lags = {rank: fastest - step for rank, step in in_step.items()}
    waits = {
        one.rank: {*one.waiting_for, *(other for part in seen[one.rank] for other in part.waiting_for)} for one in led
    }
    return tuple(
        _merge_worker(
            one,
            seen[one.rank],
            step=steps[one.rank],
            lag=lags.get(one.rank),
            waiting_for=tuple(sorted(waits[one.rank])),
            awaited_by=sum(one.rank in wait for wait in waits.values()),
        )
        for one in led
    )


def _merge_worker(led: CoordinatedWorker, parts: Sequence[ShardWorker], **found: Any) -> WorkerStatus:
    staleness, told = added(part.staleness for part in parts), led.telemetry
    return WorkerStatus(
        staleness_p50=percentile(staleness, 0.5),
        staleness_p99=percentile(staleness, 0.99),
        **_same(led, "rank", "state", "host", "pid", "silent_s"),
        **{name: sum(getattr(part, name) for part in parts) for name in ("pushes", "refused", "late")},
        **_same(told, "loss", "samples_per_s", "steps_per_s", "step_s"),
        **found,
        **_split(told, parts),
    )


def _same(source: object, *names: str) -> dict[str, Any]:
    """These fields, as they are."""
    return {name: getattr(source, name) for name in names}


def _split(told: WorkerTimes, parts: Sequence[ShardWorker]) -> dict[str, Any]:
    """The parts of a step."""
    if told.step_s is None or told.blocked_s is None:
        return dict.fromkeys(("compute_s", "wait_s", "wire_s", "apply_s"))
    blocked_s = min(told.blocked_s, told.step_s)
    apply_s = min(blocked_s, max((part.apply_s or 0.0 for part in parts), default=0.0))
    wait_s = min(blocked_s - apply_s, max((part.held_s or 0.0 for part in parts), default=0.0))
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
