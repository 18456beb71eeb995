"""The status of a server, its shards, its jobs and their workers. JSON is these fields by name, as msgspec writes it.

    one shard             ShardStatus ┬► ShardJob ─► ShardWorker           a STATUS_REPORT; "shards"
    the lead's first               └► CoordinatedJob ─► CoordinatedWorker
    all shards together   JobStatus ─► WorkerStatus (``overview``)         "jobs"
    a server process      ServerStatus, with both, Event, SnapshotStatus   /status.json

``psengine status``, the dashboard and /metrics are views of it. None means unknown. The metadata of a field says how
the shards' values are merged, and how /metrics exports the field.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

# Stands for a loss that is NaN or infinite, for which JSON has no number.
NOT_FINITE: Literal["nan"] = "nan"

State = Literal["live", "silent", "joining"]


def added(counts: Iterable[Mapping[Any, int]]) -> dict[Any, int]:
    """How often each value was counted, added up; in the order of values."""
    total: Counter[Any] = Counter()
    for one in counts:
        total.update(one)
    return dict(sorted(total.items()))


def most(numbers: Iterable[Any]) -> Any:
    """The largest that is known; None of none."""
    return max((number for number in numbers if number is not None), default=None)


def _exported(kind: str, text: str, *, name: str = "", merge: Callable[..., Any] | None = None, **default: Any) -> Any:
    """A number that /metrics exports as a "gauge" or "counter", by default under the field's name."""
    return field(metadata={"kind": kind, "text": text, "name": name, "merge": merge}, **default)


def _merged(merge: Callable[[Iterable[Any]], Any], **default: Any) -> Any:
    """A field; ``merge`` makes one value of all shards'."""
    return field(metadata={"merge": merge}, **default)


_counter = partial(_exported, "counter", default=0)
_total = partial(_exported, "counter", merge=sum, default=0)
_gauge = partial(_exported, "gauge")


@dataclass(frozen=True, kw_only=True)
class WorkerTimes:
    """A worker's steps, by its heartbeats; rates and means are of the last seconds.

    Attributes:
        steps: completed steps, as the worker reported last.
        loss: as the worker reported last; ``NOT_FINITE`` if NaN or infinite.
        step_s: length of a step, in which the worker itself works for ``compute_s``, and waits for servers for
            ``blocked_s``: for their arithmetic, the network, and other workers.
    """

    steps: int | None = None
    loss: float | Literal["nan"] | None = _gauge("What the script reported last.", default=None)
    steps_per_s: float | None = _gauge("Lately.", default=None)
    samples_per_s: float | None = _gauge("Lately.", default=None)
    step_s: float | None = _gauge("Mean time of a step, lately.", default=None)
    compute_s: float | None = _gauge("Of a step, forward, backward, data.", default=None)
    blocked_s: float | None = _gauge("Of a step, waiting for servers and the workers they wait for.", default=None)


@dataclass(frozen=True, kw_only=True)
class ShardWorker:
    """A worker of the view as one shard sees it.

    Attributes:
        pushes, refused: chunks that it sent; that were refused.
        step: number of its exchange; None where no chunk of this shard is trained.
        waiting_for: ranks for which its answers are held.
        staleness: of its last pushes.
    """

    rank: int
    pushes: int = _merged(sum, default=0)
    refused: int = _merged(sum, default=0)
    step: int | None = _gauge("Steps completed.", merge=most, default=None)
    waiting_for: tuple[int, ...] = _merged(lambda sets: tuple(sorted(set().union(*sets))), default=())
    staleness: Mapping[int, int] = _merged(added, default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CoordinatedWorker(WorkerTimes):
    """A worker as its job's coordinator sees it.

    Attributes:
        silent_s: since its last message.
        waiting_for: ranks without which it does not go on.
    """

    rank: int
    state: State
    host: str = ""
    pid: int = 0
    silent_s: float = _gauge("Since its last message.", default=0.0)
    waiting_for: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WorkerStatus(CoordinatedWorker, ShardWorker):
    """A worker as all together see it; ``step`` is the one that it reported where no chunk of the job is trained.

    Attributes:
        lag: steps behind the fastest worker that takes part.
    """

    waiting_for: tuple[int, ...] = ()
    lag: int | None = _gauge("Steps behind the fastest live worker.", name="lag_steps")
    awaited_by: int = _gauge("Workers whose answers are held for this one.")
    staleness_p50: int | None = _gauge("Median age of its last pushes, in updates.")
    staleness_p99: int | None = _gauge("99th percentile of their age.")


@dataclass(frozen=True, kw_only=True)
class Departed:
    """A worker that is gone: "left", "evicted" or "fenced" after ``step``."""

    rank: int
    host: str
    reason: str
    unix_s: float
    step: int


@dataclass(kw_only=True)
class CoordinatedJob:
    """A job as its coordinator sees it; ``lost`` says why nobody can go on with it, "" where all is well."""

    rule: Mapping[str, Any]
    lost: str = ""
    expected_workers: int = 1
    evicted: int = _counter("Workers removed: their lease ran out or was ended by hand, or they were too far behind.")
    lost_updates: int = _counter("Acknowledged updates of each chunk that a restart from an older snapshot lost.")
    departed: tuple[Departed, ...] = ()
    workers: tuple[CoordinatedWorker, ...] = ()


@dataclass(kw_only=True)
class JobCounts:
    """What a shard counts of a job, since the server started; the job's rules count in it.

    Attributes:
        staleness: number of pushes by their age in updates. Large values are counted together; the sum is exact.
        refused: number of refused pushes by reason; "abstained" are those that only asked for weights.
    """

    applied: int = _total("Pushes that changed weights, or were part of an average.")
    averaged: int = _total("Exchanges of chunks that ended in an average.")
    duplicates: int = _total("Repeats that were recognised and not applied again.")
    abstained: int = _total("Exchanges a worker took part in without a gradient.")
    non_finite: int = _total("Contributions with NaN or infinity that an average passed on.")
    bytes_in: int = _total("Payload bytes received from workers: pushes, registered and stored values.")
    bytes_out: int = _total("Payload bytes sent to workers and readers.")
    staleness_sum: int = _merged(sum, default=0)
    max_staleness: int = _merged(partial(max, default=0), default=0)
    refused: dict[str, int] = field(default_factory=Counter, metadata={"merge": added})
    staleness: dict[int, int] = field(default_factory=Counter, metadata={"merge": added})


@dataclass(kw_only=True)
class ShardJob(JobCounts):
    """A job at one shard.

    Attributes:
        table_rows, table_bytes, table_evicted: by table, rows that exist; their memory, with the optimizer's state;
            rows that max_rows removed, since the server started.
    """

    rule: Mapping[str, Any]
    version_min: int = _merged(partial(min, default=0), default=0)
    version_max: int = _gauge(
        "Updates the newest chunk has seen.", name="version", merge=partial(max, default=0), default=0
    )
    members: int = _gauge("Members.", name="workers", default=0)
    chunks: int = _merged(sum, default=0)
    values_bytes: int = _merged(sum, default=0)
    table_rows: Mapping[str, int] = _merged(added, default_factory=dict)
    table_bytes: Mapping[str, int] = _merged(added, default_factory=dict)
    table_evicted: Mapping[str, int] = _merged(added, default_factory=dict)
    workers: tuple[ShardWorker, ...] = ()


@dataclass(kw_only=True)
class JobStatus(CoordinatedJob, ShardJob):
    """A job as all together see it; ``kind`` is the strategy's name, ``rule_text`` has its options too."""

    rule_text: str
    kind: str
    workers: tuple[WorkerStatus, ...]


@dataclass(frozen=True, kw_only=True)
class Transport:
    """What went over a shard's socket since the server started."""

    received_messages: int = _counter("Messages received.")
    received_bytes: int = _counter("Bytes received, in frames.")
    sent_bytes: int = _counter("Bytes sent, in frames.")
    closed: int = _counter("Connections that were closed: their peer did not read.")
    connections: int = _gauge("Open.", default=0)
    turned_away: int = _counter("Connections that were one too many, of one process or address or of all.")
    dropped: int = _counter("Connections whose other end was gone before their messages were read.")
    dropped_messages: int = _counter("Messages over connections that were gone, dropped unread.")
    bad_messages: int = _counter("Messages that broke the protocol.")
    failures: int = _counter("Messages on which the server itself failed.")


@dataclass(frozen=True, kw_only=True)
class SnapshotStatus:
    """A server's snapshots; ``age_s`` is the time since the generation last held everything that the server holds."""

    interval_s: float = _gauge("0: on request.")
    generation: int | None = _gauge("Durable to.")
    age_s: float | None = _gauge("Since the latest was last known to hold everything.")
    last_seconds: float = _gauge("How long the last one took.", name="seconds")
    failures: int = _exported("counter", "Snapshots not written.")
    last_error: str


@dataclass(frozen=True, kw_only=True)
class LogStatus:
    """One shard's log, since the server started.

    Attributes:
        waiting_records: those that are not on the disk yet.
        free_bytes: room on its disk, looked at once a second.
    """

    shard: int
    waiting_records: int = _gauge("Not durable, and so not acknowledged.")
    written_bytes: int = _exported("counter", "Written to the log.", name="bytes")
    syncs: int = _exported("counter", "Groups made durable.")
    sync_seconds: float = _exported("counter", "Time that syncs took.")
    is_full: bool = _gauge("Whether the disk is full, so that nothing is acknowledged.", name="full")
    free_bytes: int | None = _gauge("Room on the log's disk.", default=None)


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """A server that has a follower, is one, or is to have one.

    Attributes:
        role: only who is "leading" serves workers.
        peers: the addresses of the follower, or of who is followed.
        is_in_sync: whether the follower may take over: it has every update that is acknowledged.
        lag_records: those that the follower lacks.
        election: who decides, as ``--election`` says it.
        why: what is waited for; "" where nothing is.
    """

    role: Literal["looking", "following", "leading", "fenced"]
    term: int = _gauge("Grows when another process leads.")
    peers: tuple[str, ...] = ()
    is_in_sync: bool = _gauge("Whether the follower has all that is acknowledged.", name="replica_in_sync")
    lag_records: int | None = _gauge("Records that the follower lacks.", name="replica_lag_records", default=None)
    election: str = ""
    why: str = ""

    @property
    def text(self) -> str:
        """In words, for people."""
        sync = "in sync" if self.is_in_sync else "not in sync"
        lag = "" if self.lag_records is None else f", {self.lag_records} records behind"
        return f"{self.role}, term {self.term}, {sync}{lag}"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Attributes:
        unix_s: when, by the wall clock.
        kind: one word, such as "evicted".
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
    uptime_s: float | None = _gauge("Since the process started.", default=None)
    healthy: bool = _gauge("Whether every shard answers.", default=True)
    addresses: tuple[str, ...] = ()
    refused_connections: int = _counter("Wrong or no key.")
    connection_limit: int = _gauge("Most connections: the limit of open files leaves them.", default=0)
    keep_ended_jobs: str = "all"
    durability: str = ""
    snapshot: SnapshotStatus | None = None
    logs: tuple[LogStatus, ...] = ()
    replica: ReplicaStatus | None = None
    events: tuple[Event, ...] = ()
    is_draining: bool = _gauge("Whether it lets no more workers in.", name="draining", default=False)


@dataclass(frozen=True, kw_only=True)
class ShardStatus:
    """A shard; ``error`` says why nothing else is known of it.

    ``transport`` is on the status page alone; ``server`` is in the first shard's STATUS_REPORT alone. ``coordinated``
    are the jobs that this server leads, at its first shard.
    """

    index: int
    error: str = ""
    epoch: int = 0
    memory_bytes: int = _gauge("Held for jobs.", default=0)
    max_memory_bytes: int = _gauge("Most that may be held.", name="memory_limit_bytes", default=0)
    transport: Transport | None = None
    server: ServerFacts | None = None
    coordinated: Mapping[str, CoordinatedJob] = field(default_factory=dict)
    jobs: Mapping[str, ShardJob] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ServerStatus(ServerFacts):
    """A server process: /status.json."""

    shards: tuple[ShardStatus, ...]
    jobs: Mapping[str, JobStatus] = field(default_factory=dict)
