"""How a training goes, in numbers that every strategy has, and in those that servers count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """What ``model.statistics()`` returns. The last five are counts of the whole job at its servers.

    Attributes:
        strategy: its name.
        worker: number of this worker: its rank in the process group, or at the servers.
        live_workers: numbers of the workers that take part, as the servers say.
        steps: backwards of this worker whose gradients were exchanged.
        job: the job's name at the servers; None without servers.
        staleness: under async the number of pushes by their age in updates; 64 stands for 64 and more.
        updates: pushes that changed weights, or became part of an average; a large model has several in a step. None
            without servers.
        late: contributions that a quorum did not wait for, and that count nothing; None without servers.
        bytes_sent: payload bytes that workers sent to the servers; None without servers.
        bytes_received: payload bytes that workers got from them; likewise.
    """

    strategy: str
    worker: int
    live_workers: tuple[int, ...]
    steps: int = 0
    job: str | None = None
    staleness: Mapping[int, int] = field(default_factory=dict)
    updates: int | None = None
    late: int | None = None
    bytes_sent: int | None = None
    bytes_received: int | None = None


def counts_at_servers(shards: Iterable[Mapping[str, Any]], job: str) -> dict[str, Any]:
    """Return the fields of ``Statistics`` that servers count, added up over the shards' status reports."""
    reports = list(shards)
    parts = [shard["jobs"][job] for shard in reports if job in shard["jobs"]]
    coordinated = [shard["coordinated"][job] for shard in reports if job in shard["coordinated"]]
    live = {int(worker["rank"]) for one in coordinated for worker in one["workers"] if worker["state"] == "live"}
    staleness: Counter[int] = Counter()
    for part in parts:
        staleness.update({int(age): int(count) for age, count in part["staleness"].items()})
    return {
        "job": job,
        "live_workers": tuple(sorted(live)),
        "staleness": dict(sorted(staleness.items())),
        "updates": sum(int(part["applied"]) for part in parts),
        "late": sum(int(part["late"]) for part in parts),
        "bytes_sent": sum(int(part["bytes_in"]) for part in parts),
        "bytes_received": sum(int(part["bytes_out"]) for part in parts),
    }
