"""What several shards say of a job, as one view: for the status port, ``psengine status`` and ``psengine top``. Pure.

A worker's step, by what can be known of it::

    step_s = compute_s + blocked_s            the worker's own clock
             blocked_s = apply_s + wait_s + wire_s
                         apply_s   servers work on this step's gradients; of several shards, side by side, the one
                                   that takes longest
                         wait_s    servers hold the answer until others are as far
                         wire_s    the rest: network, queues, copies
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_SUMS = (
    "chunks",
    "values_bytes",
    "applied",
    "averaged",
    "duplicates",
    "late",
    "abstained",
    "non_finite",
    "bytes_in",
    "bytes_out",
)
# Exact sums of what is counted up to a bound; shards of an older psengine have none.
_EXACT_SUMS = {"staleness_sum": "staleness", "lead_sum": "lead"}
_STRATEGIES = {"average": "sync-server", "apply": "async"}
# The worst that any shard says of a worker.
_STATES = ("live", "silent", "joining")


def merge_jobs(shards: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """One view per job.

    Args:
        shards: what each shard of one or several servers says of itself, the lead first, as in the list "shards" of
            /status.json or from ``Client.status``. Those that did not answer are left out.

    Returns:
        By name of the job: its "rule", "rule_text" and "kind" (the strategy's name), counts of chunks and pushes added
        over shards, "workers" by rank, and "departed", the last that are gone. A worker's "step" counts its exchanges;
        in an asynchronous job, from where it joined. "lag" is how many steps it is behind the fastest, of those that
        take part. Where no chunk of the job is trained no exchange is counted: there "step" is what a worker says that
        it completed since it began, and "lag" is not known. What is not known is None.
    """
    parts: dict[str, list[Mapping[str, Any]]] = {}
    for shard in shards:
        for name, part in shard.get("jobs", {}).items():
            parts.setdefault(name, []).append(part)
    return {name: _merge_job(of_job) for name, of_job in sorted(parts.items())}


def _merge_job(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    lead = parts[0]
    # A shard with fewer chunks than others may have none.
    versions = [(part["version_min"], part["version_max"]) for part in parts if part["chunks"]]
    workers = _merge_workers(parts)
    return {
        "rule": lead["rule"],
        "rule_text": rule_text(lead["rule"]),
        "kind": _kind(lead["rule"]),
        "sealed": all(part["sealed"] for part in parts),
        "started": any(part["started"] for part in parts),
        "expected_workers": max(part["expected_workers"] for part in parts),
        "members": len(workers),
        "version_min": min((least for least, _ in versions), default=0),
        "version_max": max((most for _, most in versions), default=0),
        **{name: sum(part[name] for part in parts) for name in _SUMS},
        # Shards of an older psengine do not count them.
        "lost_updates": sum(part.get("lost_updates", 0) for part in parts),
        **{name: sum(_exact_sum(part, name, of) for part in parts) for name, of in _EXACT_SUMS.items()},
        "refused": dict(_added(part["refused"] for part in parts)),
        "staleness": _by_number(_added(part["staleness"] for part in parts)),
        "max_staleness": max(part["max_staleness"] for part in parts),
        # Every shard evicts the same worker.
        "evicted": max(part["evicted"] for part in parts),
        "workers": workers,
        "departed": list(lead.get("departed", [])),
    }


def _merge_workers(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    seen: dict[int, list[Mapping[str, Any]]] = {}
    for part in parts:
        for worker in part["workers"]:
            seen.setdefault(worker["rank"], []).append(worker)
    workers = [_merge_worker(rank, of_worker) for rank, of_worker in sorted(seen.items())]
    if all(worker["step"] is None for worker in workers):
        for worker in workers:
            told = [part["telemetry"]["steps"] for part in seen[worker["rank"]] if "telemetry" in part]
            worker["step"] = max((steps for steps in told if steps is not None), default=None)
        return workers
    in_step = [worker for worker in workers if worker["state"] != "joining" and worker["step"] is not None]
    fastest = max((worker["step"] for worker in in_step), default=0)
    for worker in in_step:
        worker["lag"] = fastest - worker["step"]
    return workers


def _merge_worker(rank: int, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    staleness = _added(part.get("staleness", {}) for part in parts)
    return {
        "rank": rank,
        "state": max((part["state"] for part in parts), key=_STATES.index),
        "host": parts[0]["host"],
        "pid": parts[0]["pid"],
        "silent_s": max(part["silent_s"] for part in parts),
        "step": max((part["clock"] for part in parts if part["clock"] is not None), default=None),
        "lag": None,
        "staleness_p50": percentile(staleness, 0.5),
        "staleness_p99": percentile(staleness, 0.99),
        **{name: sum(part[name] for part in parts) for name in ("pushes", "refused", "late")},
        "waiting_for": sorted({rank for part in parts for rank in part["waiting_for"]}),
        **_merge_telemetry([part["telemetry"] for part in parts if "telemetry" in part]),
    }


def _merge_telemetry(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    # Each shard hears the same heartbeats; one that was away may know less.
    first = next((part for part in parts if part["steps"] is not None), {})
    step_s, blocked_s = first.get("step_s"), first.get("blocked_s")
    view = {name: first.get(name) for name in ("loss", "samples_per_s", "steps_per_s", "step_s")}
    if step_s is None or blocked_s is None:
        return {**view, "compute_s": None, "wait_s": None, "wire_s": None, "apply_s": None}
    blocked_s = min(blocked_s, step_s)
    apply_s = min(blocked_s, max(part["apply_s"] or 0.0 for part in parts))
    wait_s = min(blocked_s - apply_s, max(part["held_s"] or 0.0 for part in parts))
    return {
        **view,
        "compute_s": round(step_s - blocked_s, 6),
        "wait_s": round(wait_s, 6),
        "wire_s": round(blocked_s - apply_s - wait_s, 6),
        "apply_s": round(apply_s, 6),
    }


def rule_text(rule: Mapping[str, Any]) -> str:
    """A rule as users write it: the strategy's name and the options that are set, such as "async:max_staleness=2"."""
    options = [
        f"{name}={value}"
        for name, value in rule.items()
        # Zero is a bound, and elsewhere means that there is none.
        if name != "name" and (value or (name == "max_staleness" and value is not None))
    ]
    return ":".join([_kind(rule), ",".join(options)] if options else [_kind(rule)])


def _kind(rule: Mapping[str, Any]) -> str:
    return _STRATEGIES.get(rule["name"], str(rule["name"]))


def percentile(counts: Mapping[str, int], share: float) -> int | None:
    """The smallest number that at least ``share`` of the counted ones do not exceed; None of nothing.

    Args:
        counts: number, as text, to how often it was seen.
        share: such as 0.5.
    """
    total = sum(counts.values())
    reached = 0
    for number, count in sorted((int(number), count) for number, count in counts.items()):
        reached += count
        if reached >= share * total:
            return number
    return None


def _added(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return total


def _exact_sum(part: Mapping[str, Any], name: str, of: str) -> int:
    counts = part.get(of, {})
    return int(part.get(name, sum(int(number) * count for number, count in counts.items())))


def _by_number(counts: Mapping[str, int]) -> dict[str, int]:
    return {str(number): counts[str(number)] for number in sorted(int(number) for number in counts)}
