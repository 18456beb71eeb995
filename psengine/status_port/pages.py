"""What a server's status port serves: dashboard, health, status, metrics."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from importlib import resources
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from psengine.protocol.messages import DURABILITY_TIERS, PUSH_REFUSALS
from psengine.status_port import status_model
from psengine.status_port.http_status import HTML, JSON, TEXT, Pages
from psengine.status_port.overview import owns_weights

# One script, in this order: the server's data, charts, the rest of the page.
SCRIPTS = ("dashboard_data.js", "dashboard_charts.js", "dashboard.js")
# The training's name. "job" is Prometheus's own label, of what it scrapes; it would rename ours.
LABEL = "training_job"
HISTOGRAM_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 63)
_FAMILIES = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
_OF_TABLES = (
    ("table_rows", "gauge", "Rows that exist."),
    ("table_bytes", "gauge", "Memory of rows and of their optimizer's state."),
    ("table_evicted", "counter", "Rows that max_rows removed."),
)
# What has a metric's numbers, and the values of its labels.
_Rows = Iterable[tuple[Sequence[str], Any]]


def server_pages(status: Callable[[], status_model.ServerStatus], is_healthy: Callable[[], bool]) -> Pages:
    """The pages by path.

    Args:
        status: for /status.json and /metrics; called in request threads.
        is_healthy: for /healthz, 200 or 503.
    """
    return {
        "/": lambda: (200, HTML, dashboard()),
        "/status.json": lambda: (200, JSON, msgspec.json.encode(status())),
        "/metrics": lambda: (200, *render_metrics(status())),
        "/healthz": lambda: (200, TEXT, b"ok\n") if is_healthy() else (503, TEXT, b"a shard does not answer\n"),
    }


@cache
def dashboard() -> bytes:
    """The dashboard, without outside assets; its policy lets a browser run its own code and no other.

    So names of hosts and jobs could not become code even by mistake.
    """
    style, script = f"\n{_text('dashboard.css')}", "\n" + "\n".join(map(_text, SCRIPTS))
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src 'self'; img-src data:;"
        " base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )
    page = _text("dashboard.html").replace("POLICY", policy)
    page = page.replace("<style></style>", f"<style>{style}</style>")
    return page.replace("<script></script>", f"<script>{script}</script>").encode()


def _text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def render_metrics(status: status_model.ServerStatus) -> tuple[str, bytes]:
    """Content type and text of ``status`` for Prometheus."""
    collector: Any = SimpleNamespace(collect=lambda: _families(status))
    return CONTENT_TYPE_LATEST, generate_latest(collector)


def _families(status: status_model.ServerStatus) -> Iterator[Any]:
    yield from _exported("", status_model.ServerFacts, [], [((), status)])
    kept = [([tier], tier == status.durability) for tier in DURABILITY_TIERS]
    yield _family("gauge", "durability", "1 for the tier that it offers.", ["tier"], kept)
    lost = sum(owns_weights(job.rule) for job in status.jobs.values()) if status.durability == "memory" else 0
    yield _family("gauge", "unsaved_jobs", "Whose model is lost when the server ends.", [], [((), lost)])
    if status.snapshot is not None:
        yield from _exported("snapshot_", status_model.SnapshotStatus, [], [((), status.snapshot)])
    if status.replica is not None:
        yield from _exported("", status_model.ReplicaStatus, [], [((), status.replica)])
    yield from _exported("log_", status_model.LogStatus, ["shard"], [([str(log.shard)], log) for log in status.logs])
    yield from _of_shards([shard for shard in status.shards if not shard.error])
    yield from _of_workers(status.jobs)


def _of_shards(shards: list[status_model.ShardStatus]) -> Iterator[Any]:
    yield from _exported("", status_model.ShardStatus, ["shard"], [([str(shard.index)], shard) for shard in shards])
    moved = [([str(shard.index)], shard.transport) for shard in shards]
    yield from _exported("transport_", status_model.Transport, ["shard"], moved)
    jobs = [([name, str(shard.index)], job) for shard in shards for name, job in shard.jobs.items()]
    led = [([name, str(shard.index)], job) for shard in shards for name, job in shard.coordinated.items()]
    by_job = [LABEL, "shard"]
    yield from _exported("", status_model.ShardJob, by_job, jobs)
    yield from _exported("", status_model.CoordinatedJob, by_job, led)
    for field, kind, text in _OF_TABLES:
        of_tables = [([*labels, table], n) for labels, job in jobs for table, n in getattr(job, field).items()]
        yield _family(kind, field, text, [*by_job, "table"], of_tables)
    pushes = [([*labels, str(worker.rank)], worker.pushes) for labels, job in jobs for worker in job.workers]
    yield _family("counter", "pushes", "Pushes that arrived.", [*by_job, "worker"], pushes)
    # From 0: Prometheus's increase() does not see a series that begins with 1.
    refused = [([*labels, reason], job.refused.get(reason, 0)) for labels, job in jobs for reason in PUSH_REFUSALS]
    yield _family("counter", "refused", "Pushes refused.", [*by_job, "reason"], refused)
    text = "Updates between a push's weights and its application."
    staleness = HistogramMetricFamily("psengine_staleness", text, labels=by_job)
    for labels, job in jobs:
        counts = job.staleness
        buckets = [(str(float(b)), sum(c for age, c in counts.items() if age <= b)) for b in HISTOGRAM_BOUNDS]
        # The largest values are counted together; their sum is exact.
        staleness.add_metric(labels, [*buckets, ("+Inf", sum(counts.values()))], sum_value=job.staleness_sum)
    yield staleness


def _of_workers(jobs: Mapping[str, status_model.JobStatus]) -> Iterator[Any]:
    """Of jobs as a whole, over all shards."""
    workers = [([name, str(worker.rank)], worker) for name, job in jobs.items() for worker in job.workers]
    yield from _exported("worker_", status_model.WorkerStatus, [LABEL, "worker"], workers)
    states = [
        ([name, state], sum(worker.state == state for worker in job.workers))
        for name, job in jobs.items()
        for state in get_args(status_model.State)
    ]
    yield _family("gauge", "job_workers", "Workers of the job by state.", [LABEL, "state"], states)


def _exported(prefix: str, model: type, labels: Sequence[str], rows: _Rows) -> Iterator[Any]:
    """A family for each field of the model that is exported."""
    for one in fields(model):
        if "kind" in one.metadata:
            name = one.metadata["name"] or one.name
            for short, long in (("_per_s", "_per_second"), ("_s", "_seconds")):
                name = name.removesuffix(short) + long if name.endswith(short) else name
            samples = [(values, getattr(source, one.name)) for values, source in rows]
            yield _family(one.metadata["kind"], prefix + name, one.metadata["text"], labels, samples)


def _family(kind: str, name: str, text: str, labels: Sequence[str], samples: _Rows) -> Any:
    family = _FAMILIES[kind](f"psengine_{name}", text, labels=labels)
    for values, number in samples:
        if number is not None:  # unknown
            family.add_metric(values, float(number))  # a loss may be "nan"
    return family
