"""The status as Prometheus reads it: families of metrics, named psengine_*."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from psengine.environment.extras import missing_extra

# Of the training's name. "job" is Prometheus's own, of what it scrapes; it would rename ours.
LABEL = "training_job"

_COUNTERS = {
    "applied": "Pushes that changed weights, or were part of an average.",
    "averaged": "Exchanges of chunks that ended in an average.",
    "duplicates": "Repeats that were recognised and not applied again.",
    "late": "Contributions that came after their exchange had ended.",
    "abstained": "Exchanges a worker took part in without a gradient.",
    "non_finite": "Contributions with NaN or infinity that an average passed on.",
    "lost_updates": "Pushes that were acknowledged, and lost when the server went back to a snapshot without them.",
    "evicted": "Workers put out: their lease ran out or was ended by hand, or they were too far behind.",
    "bytes_in": "Payload bytes received from workers: pushes, registered and stored values.",
    "bytes_out": "Payload bytes sent to workers and readers.",
}
_TRANSPORT = {
    "received_messages": "Messages received.",
    "received_bytes": "Bytes received, in frames.",
    "sent_bytes": "Bytes sent, in frames.",
    "dropped": "Messages not sent: their peer was gone or did not read.",
    "bad_messages": "Messages that broke the protocol.",
    "failures": "Messages on which the server itself failed.",
}


def render_metrics(status: dict[str, Any]) -> tuple[str, bytes]:
    """Content type and text of ``status`` for Prometheus.

    Raises:
        MissingExtraError: prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.exposition import CONTENT_TYPE_LATEST
        from prometheus_client.registry import Collector
    except ImportError as error:
        raise missing_extra("metrics", error) from error

    class StatusCollector(Collector):
        def collect(self) -> Iterable[Any]:
            return _families(status)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector())
    return CONTENT_TYPE_LATEST, generate_latest(registry)


def _families(status: dict[str, Any]) -> Iterable[Any]:
    from prometheus_client.core import CounterMetricFamily as Counter
    from prometheus_client.core import GaugeMetricFamily as Gauge

    shards = [shard for shard in status["shards"] if "jobs" in shard]
    jobs = [(name, str(shard["index"]), job) for shard in shards for name, job in shard["jobs"].items()]
    yield Gauge("psengine_healthy", "Whether every shard answers.", value=float(status["healthy"]))
    yield Gauge("psengine_uptime_seconds", "Since the process started.", value=status["uptime_s"])
    yield Counter("psengine_refused_connections", "Wrong or no key.", value=status["refused_connections"])
    memory = Gauge("psengine_memory_bytes", "Held for jobs.", labels=["shard"])
    limit = Gauge("psengine_memory_limit_bytes", "Most that may be held.", labels=["shard"])
    for shard in shards:
        memory.add_metric([str(shard["index"])], shard["memory_bytes"])
        limit.add_metric([str(shard["index"])], shard["max_memory_bytes"])
    yield from (memory, limit)
    for name, text in _TRANSPORT.items():
        family = Counter(f"psengine_transport_{name}", text, labels=["shard"])
        for shard in shards:
            family.add_metric([str(shard["index"])], shard["transport"][name])
        yield family
    workers = Gauge("psengine_workers", "Members.", labels=[LABEL, "shard"])
    version = Gauge("psengine_version", "Updates the newest chunk has seen.", labels=[LABEL, "shard"])
    pushes = Counter("psengine_pushes", "Pushes that arrived.", labels=[LABEL, "shard", "worker"])
    refused = Counter("psengine_refused", "Pushes refused.", labels=[LABEL, "shard", "reason"])
    for name, index, job in jobs:
        workers.add_metric([name, index], job["members"])
        version.add_metric([name, index], job["version_max"])
        for worker in job["workers"]:
            pushes.add_metric([name, index, str(worker["rank"])], worker["pushes"])
        for reason, count in job["refused"].items():
            refused.add_metric([name, index, reason], count)
    yield from (workers, version, pushes, refused)
    for name, text in _COUNTERS.items():
        family = Counter(f"psengine_{name}", text, labels=[LABEL, "shard"])
        for job_name, index, job in jobs:
            family.add_metric([job_name, index], job.get(name, 0))
        yield family
    yield _histogram("psengine_staleness", "Updates between a push's weights and its application.", "staleness", jobs)
    yield _histogram("psengine_lead", "Steps an answered worker was ahead of the slowest.", "lead", jobs)
    yield from _worker_families(status.get("jobs", {}))
    yield from _snapshot_families(status["snapshot"])


def _histogram(name: str, text: str, field: str, jobs: list[tuple[str, str, dict[str, Any]]]) -> Any:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(name, text, labels=[LABEL, "shard"])
    for job_name, index, job in jobs:
        counts = {int(key): count for key, count in job.get(field, {}).items()}
        bounds = [0, 1, 2, 4, 8, 16, 32, 63]
        buckets = [(str(float(b)), sum(c for key, c in counts.items() if key <= b)) for b in bounds]
        buckets.append(("+Inf", sum(counts.values())))
        # The largest values are counted together; their sum is exact.
        family.add_metric([job_name, index], buckets, sum_value=job.get(f"{field}_sum", 0))
    return family


_WORKER_GAUGES = {
    "step": ("step", "Steps completed."),
    "lag": ("lag_steps", "Steps behind the fastest live worker."),
    "loss": ("loss", "What the script reported last."),
    "silent_s": ("silent_seconds", "Since its last message."),
    "steps_per_s": ("steps_per_second", "Lately."),
    "samples_per_s": ("samples_per_second", "Lately."),
    "step_s": ("step_seconds", "Mean time of a step, lately."),
}
_STEP_PARTS = ("compute", "wait", "wire", "apply")
_STATES = ("live", "joining", "silent")


def _worker_families(jobs: dict[str, dict[str, Any]]) -> Iterable[Any]:
    """Of jobs as a whole, over all shards; what is not known is left out."""
    from prometheus_client.core import GaugeMetricFamily as Gauge

    workers = [(name, str(worker["rank"]), worker) for name, job in jobs.items() for worker in job["workers"]]
    for field, (name, text) in _WORKER_GAUGES.items():
        family = Gauge(f"psengine_worker_{name}", text, labels=[LABEL, "worker"])
        for job, rank, worker in workers:
            if worker.get(field) is not None:
                family.add_metric([job, rank], float(worker[field]))  # a loss may be "nan"
        yield family
    parts = Gauge("psengine_worker_step_part_seconds", "Where a step's time goes.", labels=[LABEL, "worker", "part"])
    staleness = Gauge(
        "psengine_worker_staleness", "Quantiles of its pushes' staleness.", labels=[LABEL, "worker", "quantile"]
    )
    for job, rank, worker in workers:
        for part in _STEP_PARTS:
            if worker.get(f"{part}_s") is not None:
                parts.add_metric([job, rank, part], worker[f"{part}_s"])
        for field, quantile in (("staleness_p50", "0.5"), ("staleness_p99", "0.99")):
            if worker.get(field) is not None:
                staleness.add_metric([job, rank, quantile], worker[field])
    states = Gauge("psengine_job_workers", "Workers of the job by state.", labels=[LABEL, "state"])
    for job, merged in jobs.items():
        for state in _STATES:
            states.add_metric([job, state], sum(worker["state"] == state for worker in merged["workers"]))
    yield from (parts, staleness, states)


def _snapshot_families(snapshot: dict[str, Any] | None) -> Iterable[Any]:
    from prometheus_client.core import CounterMetricFamily as Counter
    from prometheus_client.core import GaugeMetricFamily as Gauge

    if snapshot is None:
        return
    yield Gauge("psengine_snapshot_generation", "Durable to.", value=snapshot["generation"] or 0)
    if snapshot["age_s"] is not None:
        text = "Since the latest was last known to hold everything."
        yield Gauge("psengine_snapshot_age_seconds", text, value=snapshot["age_s"])
    yield Gauge("psengine_snapshot_seconds", "What the last one took.", value=snapshot["last_seconds"])
    yield Counter("psengine_snapshot_failures", "Snapshots not written.", value=snapshot["failures"])
