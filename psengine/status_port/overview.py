"""The statuses of a job, of its coordinator and its shards, merged into one ``JobStatus``. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from psengine.status_port.status_model import (
    CoordinatedJob,
    CoordinatedWorker,
    JobStatus,
    ShardJob,
    ShardStatus,
    ShardWorker,
    WorkerStatus,
)

_STRATEGIES = {"average": "sync-server", "apply": "async", "merge": "diloco-server", "elastic": "sync"}


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
        led = {**shard.coordinated, **led}
    return {name: _merge_job(led.get(name), parts.get(name, [])) for name in sorted({*led, *parts})}


def _merge_job(led: CoordinatedJob | None, parts: Sequence[ShardJob]) -> JobStatus:
    """``led``: None where the job's lead was not asked."""
    seen: dict[int, list[ShardWorker]] = {}
    for worker in (worker for part in parts for worker in part.workers):
        seen.setdefault(worker.rank, []).append(worker)
    if led is None:
        led = CoordinatedJob(
            rule=parts[0].rule, workers=tuple(CoordinatedWorker(rank=rank, state="live") for rank in seen)
        )
    workers = _merge_workers(sorted(led.workers, key=lambda one: one.rank), seen)
    # Only a job that has ended, or of which ranks are reserved, has no rule: it owns no weights.
    rule = led.rule or next((part.rule for part in parts), {"name": "average"})
    # A shard with fewer chunks than others may have none.
    trained = [part for part in parts if part.chunks]
    found = {**vars(led), **_merged(ShardJob, trained), "rule": rule, "workers": workers}
    return JobStatus(**found, rule_text=rule_text(rule), kind=_kind(rule), members=len(workers))


def _merged(kind: type, parts: Sequence[Any]) -> dict[str, Any]:
    """The fields of all shards' ``parts`` as one, where they can be."""
    merges = {one.name: merge for one in fields(kind) if (merge := one.metadata.get("merge"))}
    return {name: merge([getattr(part, name) for part in parts]) for name, merge in merges.items()}


def _merge_workers(
    led: Sequence[CoordinatedWorker], seen: Mapping[int, Sequence[ShardWorker]]
) -> tuple[WorkerStatus, ...]:
    merged = {one.rank: _merged(ShardWorker, seen.get(one.rank, ())) for one in led}
    in_step = [step for one in led if (step := merged[one.rank]["step"]) is not None and one.state != "joining"]
    is_trained = any(here["step"] is not None for here in merged.values())
    waits = {one.rank: {*one.waiting_for, *merged[one.rank]["waiting_for"]} for one in led}
    found = []
    for one in led:
        here = merged[one.rank]
        has_lag = one.state != "joining" and here["step"] is not None
        if not is_trained:
            here["step"] = one.steps
        told = {
            "waiting_for": tuple(sorted(waits[one.rank])),
            "awaited_by": sum(one.rank in wait for wait in waits.values()),
            "lag": max(in_step) - here["step"] if has_lag else None,
            "staleness_p50": percentile(here["staleness"], 0.5),
            "staleness_p99": percentile(here["staleness"], 0.99),
        }
        found.append(WorkerStatus(**{**vars(one), **here, **told}))
    return tuple(found)


def owns_weights(rule: Mapping[str, Any]) -> bool:
    """Whether a job of this rule keeps its weights at the servers; where gradients are averaged, workers have them."""
    return rule["name"] not in ("average", "elastic")


def rule_text(rule: Mapping[str, Any]) -> str:
    """A rule as users write it: the strategy's name and the options that are set, such as "async:max_staleness=2"."""
    if rule.get("tables") and rule["name"] == "merge":
        return _kind(rule)
    options = [
        f"{name}={str(value).replace(':', ',')}"  # options of a codec are written like the strategy's own
        for name, value in rule.items()
        # 0 is a value of these two; of other options it means that there is no such thing.
        if value or (name in ("max_staleness", "compensation_decay") and value is not None)
        if name not in ("name", "facts", "tables")
    ]
    return ":".join([_kind(rule), ",".join(options)] if options else [_kind(rule)])


def _kind(rule: Mapping[str, Any]) -> str:
    if rule.get("tables"):
        return "average of tables" if rule["name"] == "merge" else "async tables"
    return _STRATEGIES.get(rule["name"], str(rule["name"]))


def percentile(counts: Mapping[int, int], share: float) -> int | None:
    """The smallest number that at least ``share`` of the counted ones do not exceed; None of nothing."""
    total = sum(counts.values())
    reached = 0
    for number, count in sorted(counts.items()):
        reached += count
        if reached >= share * total:
            return number
    return None
