"""How a training goes, in numbers that every strategy has, and in those that servers count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from psengine.status_port.overview import merge_jobs
from psengine.status_port.status_model import ShardStatus


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """What ``model.statistics()`` returns. The last five are counts of the whole job at its servers.

    Attributes:
        strategy: its name.
        worker: number of this worker: its rank in the process group, or at the servers.
        live_workers: numbers of the workers that take part, as the servers say.
        steps: backwards of this worker whose gradients were exchanged.
        empty_steps: those of them to which no worker of "sync-server" contributed, and which were left out.
        job: the job's name at the servers; None without servers.
        staleness: under async the number of pushes by their age in updates; 64 stands for 64 and more.
        updates: pushes that changed weights, or became part of an average; a large model has several in a step. None
            without servers.
        bytes_sent: payload bytes that workers sent to the servers; None without servers.
        bytes_received: payload bytes that workers got from them; likewise.
    """

    strategy: str
    worker: int
    live_workers: tuple[int, ...]
    steps: int = 0
    empty_steps: int = 0
    job: str | None = None
    staleness: Mapping[int, int] = field(default_factory=dict)
    updates: int | None = None
    bytes_sent: int | None = None
    bytes_received: int | None = None


def counts_at_servers(shards: Sequence[Mapping[str, Any]], job: str) -> dict[str, Any]:
    """Return the fields of ``Statistics`` that servers count, by the shards' status reports."""
    found = merge_jobs(msgspec.convert(shards, tuple[ShardStatus, ...], str_keys=True))[job]
    return {
        "job": job,
        "live_workers": tuple(worker.rank for worker in found.workers if worker.state == "live"),
        "staleness": found.staleness,
        "updates": found.applied,
        "bytes_sent": found.bytes_in,
        "bytes_received": found.bytes_out,
    }
