"""The status as Prometheus reads it: families of metrics, named psengine_*."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from psengine.parameter_server.overview import owns_weights
from psengine.parameter_server.status_model import (
    JobCounters,
    JobFacts,
    JobStatus,
    LogStatus,
    ServerStatus,
    ShardJob,
    ShardStatus,
    SnapshotStatus,
    State,
    Transport,
    WorkerStatus,
)
from psengine.protocol.messages import DURABILITY_TIERS, PUSH_REFUSALS

# The training's name. "job" is Prometheus's own label, of what it scrapes; it would rename ours.
LABEL = "training_job"
HISTOGRAM_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 63)

# A metric of several samples: their labels' values, and the value.
Samples = Iterable[tuple[list[str], float]]


def render_metrics(status: ServerStatus) -> tuple[str, bytes]:
    """Content type and text of ``status`` for Prometheus."""

    class StatusCollector(Collector):
        def collect(self) -> Iterable[Any]:
            yield _gauge("healthy", "Whether every shard answers.", [], [([], float(status.healthy))])
            yield _gauge("uptime_seconds", "Since the process started.", [], [([], status.uptime_s or 0.0)])
            yield _counter("refused_connections", "Wrong or no key.", [], [([], status.refused_connections)])
            yield _gauge("draining", "Whether it lets no more workers in.", [], [([], float(status.is_draining))])
            kept: Samples = [([tier], float(tier == status.durability)) for tier in DURABILITY_TIERS]
            yield _gauge("durability", "1 for the tier that it offers.", ["tier"], kept)
            unsaved = (
                sum(owns_weights(job.rule) for job in status.jobs.values()) if status.durability == "memory" else 0
            )
            yield _gauge("unsaved_jobs", "Whose model is lost when the server ends.", [], [([], float(unsaved))])
            yield from _of_shards(status.answering)
            yield from _of_workers(status.jobs)
            if status.snapshot is not None:
                yield from _of_snapshots(status.snapshot)
            if status.logs:
                yield from _of_logs(status.logs)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector())
    return CONTENT_TYPE_LATEST, generate_latest(registry)


def _of_shards(shards: list[ShardStatus]) -> Iterator[Any]:
    def by_shard(number: Any) -> Samples:
        return [([str(shard.index)], number(shard)) for shard in shards]

    yield _gauge("memory_bytes", "Held for jobs.", ["shard"], by_shard(lambda shard: shard.memory_bytes))
    most = by_shard(lambda shard: shard.max_memory_bytes)
    yield _gauge("memory_limit_bytes", "Most that may be held.", ["shard"], most)
    for name, text in _counters_of(Transport):
        moved = by_shard(lambda shard, name=name: getattr(shard.transport or Transport(), name))
        yield _counter(f"transport_{name}", text, ["shard"], moved)
    jobs = [([name, str(shard.index)], job) for shard in shards for name, job in shard.jobs.items()]
    by_job = [LABEL, "shard"]
    yield _gauge("workers", "Members.", by_job, [(labels, job.members) for labels, job in jobs])
    newest = [(labels, job.version_max) for labels, job in jobs]
    yield _gauge("version", "Updates the newest chunk has seen.", by_job, newest)
    pushes = [([*labels, str(worker.rank)], worker.pushes) for labels, job in jobs for worker in job.workers]
    yield _counter("pushes", "Pushes that arrived.", [*by_job, "worker"], pushes)
    # From 0: Prometheus's increase() does not see a series that begins with 1.
    refused = [([*labels, reason], job.refused.get(reason, 0)) for labels, job in jobs for reason in PUSH_REFUSALS]
    yield _counter("refused", "Pushes refused.", [*by_job, "reason"], refused)
    for name, text in _counters_of(JobCounters):
        yield _counter(name, text, by_job, [(labels, getattr(job, name)) for labels, job in jobs])
    led = [([name, str(shard.index)], job) for shard in shards for name, job in shard.coordinated.items()]
    for name, text in _counters_of(JobFacts):
        yield _counter(name, text, by_job, [(labels, getattr(job, name)) for labels, job in led])
    yield _staleness(jobs)


def _of_workers(jobs: Mapping[str, JobStatus]) -> Iterator[Any]:
    """Of jobs as a whole, over all shards; unknown values are left out."""
    workers = [([name, str(worker.rank)], worker) for name, job in jobs.items() for worker in job.workers]

    def known(field: str, *label: str) -> list[tuple[list[str], float]]:
        values = [([*labels, *label], getattr(worker, field)) for labels, worker in workers]
        return [(labels, float(value)) for labels, value in values if value is not None]  # a loss may be "nan"

    by_worker = [LABEL, "worker"]
    for one in fields(WorkerStatus):
        if "gauge" in one.metadata:
            name, text = one.metadata["gauge"]
            yield _gauge(f"worker_{name}", text, by_worker, known(one.name))
    parts = [sample for part in ("compute", "wait", "wire", "apply") for sample in known(f"{part}_s", part)]
    yield _gauge("worker_step_part_seconds", "Where a step's time goes.", [*by_worker, "part"], parts)
    quantiles = [*known("staleness_p50", "0.5"), *known("staleness_p99", "0.99")]
    yield _gauge("worker_staleness", "Quantiles of its pushes' staleness.", [*by_worker, "quantile"], quantiles)
    states = [
        ([name, state], sum(worker.state == state for worker in job.workers))
        for name, job in jobs.items()
        for state in get_args(State)
    ]
    yield _gauge("job_workers", "Workers of the job by state.", [LABEL, "state"], states)


def _of_snapshots(snapshot: SnapshotStatus) -> Iterator[Any]:
    yield _gauge("snapshot_generation", "Durable to.", [], [([], snapshot.generation or 0)])
    age: Samples = [] if snapshot.age_s is None else [([], snapshot.age_s)]
    yield _gauge("snapshot_age_seconds", "Since the latest was last known to hold everything.", [], age)
    yield _gauge("snapshot_interval_seconds", "0: on request.", [], [([], snapshot.interval_s)])
    yield _gauge("snapshot_seconds", "How long the last one took.", [], [([], snapshot.last_seconds)])
    yield _counter("snapshot_failures", "Snapshots not written.", [], [([], snapshot.failures)])


def _of_logs(logs: Sequence[LogStatus]) -> Iterator[Any]:
    def by_shard(number: Any) -> Samples:
        return [([str(log.shard)], number(log)) for log in logs]

    yield _counter("log_bytes", "Written to the log.", ["shard"], by_shard(lambda log: log.written_bytes))
    yield _counter("log_syncs", "Groups made durable.", ["shard"], by_shard(lambda log: log.syncs))
    yield _counter("log_sync_seconds", "Time that syncs took.", ["shard"], by_shard(lambda log: log.sync_seconds))
    waiting = by_shard(lambda log: log.records - log.durable_records)
    yield _gauge("log_waiting_records", "Not durable, and so not acknowledged.", ["shard"], waiting)
    full = by_shard(lambda log: float(log.is_full))
    yield _gauge("log_full", "Whether the disk is full, so that nothing is acknowledged.", ["shard"], full)
    free = [([str(log.shard)], float(log.free_bytes)) for log in logs if log.free_bytes is not None]
    yield _gauge("log_free_bytes", "Room on the log's disk.", ["shard"], free)


def _gauge(name: str, text: str, labels: list[str], samples: Samples) -> Any:
    return _filled(GaugeMetricFamily(f"psengine_{name}", text, labels=labels), samples)


def _counter(name: str, text: str, labels: list[str], samples: Samples) -> Any:
    return _filled(CounterMetricFamily(f"psengine_{name}", text, labels=labels), samples)


def _filled(family: Any, samples: Samples) -> Any:
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _staleness(jobs: list[tuple[list[str], ShardJob]]) -> Any:
    text = "Updates between a push's weights and its application."
    family = HistogramMetricFamily("psengine_staleness", text, labels=[LABEL, "shard"])
    for labels, job in jobs:
        counts = job.staleness
        buckets = [(str(float(b)), sum(c for key, c in counts.items() if int(key) <= b)) for b in HISTOGRAM_BOUNDS]
        buckets.append(("+Inf", sum(counts.values())))
        # The largest values are counted together; their sum is exact.
        family.add_metric(labels, buckets, sum_value=job.staleness_sum)
    return family


def _counters_of(model: type) -> list[tuple[str, str]]:
    """Fields of the model that are exported as counters: name and explanation."""
    return [(one.name, text) for one in fields(model) if (text := one.metadata.get("counter", ""))]
