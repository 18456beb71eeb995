"""The status of a server, its shards, its jobs and their workers. JSON is these fields by name, see ``to_json``.

    one shard             ShardStatus ┬► ShardJob ─► ShardWorker                         a STATUS_REPORT; "shards"
    the lead's first               └► CoordinatedJob ─► CoordinatedWorker ─► WorkerTimes
    all shards together   JobStatus ─► WorkerStatus (``overview.merge_jobs``)            "jobs"
    a server process      ServerStatus, with both, Event, SnapshotStatus            /status.json

``psengine status``, the dashboard, /metrics and the charts are views of it. None means unknown. The
metadata of a field says how the shards' values are merged, and how /metrics exports the field.
"""

# ruff: noqa: RUF009 - _merged() makes a dataclass field

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from operator import attrgetter
from typing import Any, Literal

# Stands for a loss that is NaN or infinite, for which JSON has no number.
NOT_FINITE: Literal["nan"] = "nan"

State = Literal["live", "silent", "joining"]
# How often each value was counted, by the value as text.
Counts = Mapping[str, int]


def added(counts: Iterable[Counts]) -> Counts:
    """Counts by value, added up; in the order of values where these are numbers."""
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(sorted(total.items(), key=lambda item: int(item[0]) if item[0].isdigit() else 0))


def _merged(merge: Callable[[Iterable[Any]], Any], explanation: str = "", **default: Any) -> Any:
    """A field; ``merge`` makes one value of all shards'. With an explanation /metrics exports it as a counter."""
    return field(**default, metadata={"merge": merge, "counter": explanation})


def _total(explanation: str = "") -> Any:
    return _merged(sum, explanation, default=0)


def _counter(explanation: str) -> Any:
    return field(default=0, metadata={"counter": explanation})


def _gauge(name: str, explanation: str, **default: Any) -> Any:
    """A number of a worker that /metrics exports as psengine_worker_``name``."""
    return field(metadata={"gauge": (name, explanation)}, **default)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTimes:
    """A worker's steps, by its heartbeats; rates and means are of the last seconds.

    Attributes:
        steps: completed steps, as the worker reported last.
        loss: as the worker reported last; ``NOT_FINITE`` if NaN or infinite.
        step_s, blocked_s: length of a step, and how long in it the worker waited for servers.
    """

    steps: int | None = None
    loss: float | Literal["nan"] | None = None
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    step_s: float | None = None
    blocked_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardWorker:
    """A worker of the view as one shard sees it.

    Attributes:
        pushes, refused, late: chunks that it sent; that were refused; that came after their average.
        clock: number of its step; None where no chunk of this shard is trained.
        waiting_for: ranks for which its answers are held.
        staleness: of its last pushes.
        apply_s, held_s: how long in a step this shard worked on its pushes, and held its answers for other workers.
    """

    rank: int
    incarnation: int
    pushes: int = 0
    refused: int = 0
    late: int = 0
    clock: int | None = None
    waiting_for: tuple[int, ...] = ()
    staleness: Counts = field(default_factory=dict)
    apply_s: float | None = None
    held_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Departed:
    """A worker that is gone: "left", "evicted" or "fenced" after ``step``."""

    rank: int
    host: str
    reason: str
    unix_s: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatedWorker:
    """A worker as its job's coordinator sees it.

    Attributes:
        silent_s: since its last message.
        waiting_for: ranks without which it does not go on.
    """

    rank: int
    incarnation: int
    state: State
    host: str
    pid: int
    silent_s: float
    waiting_for: tuple[int, ...] = ()
    telemetry: WorkerTimes = WorkerTimes()


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What a job's coordinator alone knows of it; ``phase`` is the name of its state."""

    phase: str = ""
    started: bool = False
    expected_workers: int = 1
    evicted: int = _counter("Workers removed: their lease ran out or was ended by hand, or they were too far behind.")
    lost_updates: int = _counter("Acknowledged updates of each chunk that a restart from an older snapshot lost.")
    departed: tuple[Departed, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CoordinatedJob(JobFacts):
    """A job as its coordinator sees it."""

    rule: Mapping[str, Any]
    workers: tuple[CoordinatedWorker, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JobCounters:
    """A job's counters at one shard, or over all of them.

    Attributes:
        staleness: number of pushes by their age in updates. Large values are counted together; the sum is exact.
        refused: number of refused pushes by reason; "abstained" are those that only asked for weights.
    """

    rule: Mapping[str, Any]
    sealed: bool = _merged(all, default=False)
    version_min: int = 0
    version_max: int = 0
    members: int = 0
    chunks: int = _total()
    values_bytes: int = _total()
    applied: int = _total("Pushes that changed weights, or were part of an average.")
    averaged: int = _total("Exchanges of chunks that ended in an average.")
    duplicates: int = _total("Repeats that were recognised and not applied again.")
    late: int = _total("Contributions that came after their exchange had ended.")
    abstained: int = _total("Exchanges a worker took part in without a gradient.")
    non_finite: int = _total("Contributions with NaN or infinity that an average passed on.")
    bytes_in: int = _total("Payload bytes received from workers: pushes, registered and stored values.")
    bytes_out: int = _total("Payload bytes sent to workers and readers.")
    staleness_sum: int = _total()
    max_staleness: int = _merged(max, default=0)
    refused: Counts = _merged(added, default_factory=dict)
    staleness: Counts = _merged(added, default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ShardJob(JobCounters):
    """A job at one shard."""

    memory_bytes: int = 0
    workers: tuple[ShardWorker, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """What went over a shard's socket since the server started."""

    received_messages: int = _counter("Messages received.")
    received_bytes: int = _counter("Bytes received, in frames.")
    sent_bytes: int = _counter("Bytes sent, in frames.")
    closed: int = _counter("Connections that were closed: their peer did not read, or ended no message.")
    bad_messages: int = _counter("Messages that broke the protocol.")
    failures: int = _counter("Messages on which the server itself failed.")
    unread_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MuteShard:
    """A shard that did not answer its server, and why."""

    index: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A worker as all shards together see it: the worst state, pushes added up.

    Attributes:
        step: number of its exchange. Where no chunk of the job is trained, the steps that it reported.
        lag: steps behind the fastest worker that takes part.
        compute_s, wait_s, wire_s, apply_s: the parts of ``step_s``, see ``overview``.
    """

    rank: int
    state: State
    host: str
    pid: int
    silent_s: float = _gauge("silent_seconds", "Since its last message.")
    step: int | None = _gauge("step", "Steps completed.")
    lag: int | None = _gauge("lag_steps", "Steps behind the fastest live worker.")
    staleness_p50: int | None
    staleness_p99: int | None
    pushes: int
    refused: int
    late: int
    waiting_for: tuple[int, ...]
    awaited_by: int = _gauge("awaited_by", "Workers whose answers are held for this one.", default=0)
    loss: float | Literal["nan"] | None = _gauge("loss", "What the script reported last.")
    samples_per_s: float | None = _gauge("samples_per_second", "Lately.")
    steps_per_s: float | None = _gauge("steps_per_second", "Lately.")
    step_s: float | None = _gauge("step_seconds", "Mean time of a step, lately.")
    compute_s: float | None
    wait_s: float | None
    wire_s: float | None
    apply_s: float | None


@dataclass(frozen=True, kw_only=True)
class JobStatus(JobFacts, JobCounters):
    """A job as all its shards together see it; ``kind`` is the strategy's name, ``rule_text`` has its options too."""

    rule_text: str
    kind: str
    workers: tuple[WorkerStatus, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotStatus:
    """A server's snapshots; ``age_s`` is the time since the generation last held everything that the server holds."""

    directory: str
    interval_s: float
    generation: int | None
    age_s: float | None
    last_seconds: float
    failures: int
    last_error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStatus:
    """One shard's log, since the server started; records are numbered from the first that the directory ever had.

    ``free_bytes``: room on its disk, looked at once a second.
    """

    shard: int
    records: int
    durable_records: int
    written_bytes: int
    syncs: int
    sync_seconds: float
    is_full: bool
    free_bytes: int | None = None
    error: str


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Attributes:
        unix_s: when, by the wall clock.
        kind: such as "joined" or "evicted".
        job: name of the job, "" where it concerns none.
        worker: rank, None where it concerns none.
        text: for people, without a full stop.
    """

    unix_s: float
    kind: str
    job: str
    worker: int | None
    text: str


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """What a server process says of itself."""

    host: str = ""
    unix_s: float | None = None
    software: str = ""
    pid: int | None = None
    epoch: int = 0
    uptime_s: float | None = None
    healthy: bool = True
    addresses: tuple[str, ...] = ()
    refused_connections: int = 0
    durability: str | None = None
    snapshot: SnapshotStatus | None = None
    logs: tuple[LogStatus, ...] = ()
    events: tuple[Event, ...] = ()
    is_draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStatus:
    """A shard; ``durability`` is its server's.

    ``transport`` is on the status page alone; ``server`` is in the first shard's STATUS_REPORT alone. ``coordinated``
    are the jobs that this server leads, at its first shard.
    """

    index: int
    epoch: int = 0
    address: str = ""
    durability: str | None = None
    memory_bytes: int = 0
    max_memory_bytes: int = 0
    unix_s: float | None = None
    software: str = ""
    transport: Transport | None = None
    server: ServerFacts | None = None
    coordinated: Mapping[str, CoordinatedJob] = field(default_factory=dict)
    jobs: Mapping[str, ShardJob] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ServerStatus(ServerFacts):
    """A server process: /status.json."""

    shards: tuple[ShardStatus | MuteShard, ...]
    jobs: Mapping[str, JobStatus] = field(default_factory=dict)

    @property
    def answering(self) -> list[ShardStatus]:
        """The shards that answered."""
        return [shard for shard in self.shards if isinstance(shard, ShardStatus)]

    @property
    def mute(self) -> list[MuteShard]:
        """The shards that did not."""
        return [shard for shard in self.shards if isinstance(shard, MuteShard)]


def to_json(status: Any) -> Any:
    """A status, or a part of one, in JSON's types: dataclasses as objects with a member for each field."""
    if isinstance(status, dict):
        members: Iterable[tuple[str, Any]] = status.items()
    elif isinstance(status, list | tuple):
        return [item if type(item) in _PLAIN else to_json(item) for item in status]
    elif hasattr(status, "__dataclass_fields__"):
        kind: Any = type(status)
        members = _members(kind)(status)
    else:
        return status
    return {name: value if type(value) in _PLAIN else to_json(value) for name, value in members}


_PLAIN = frozenset({int, float, str, bool, type(None)})


@cache
def _members(kind: type) -> Callable[[Any], Iterable[tuple[str, Any]]]:
    """A function that yields names and values of a ``kind``'s fields; fast, as shards need thousands a second."""
    names = [one.name for one in fields(kind)]
    values = attrgetter(*names)
    return lambda status: zip(names, values(status), strict=True)
