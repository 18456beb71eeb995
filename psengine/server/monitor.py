"""HTTP for people and for Prometheus, on this machine only, and read-only: health, status, metrics."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from psengine.errors import MissingExtraError
from psengine.extras import missing_extra

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
MAX_REQUESTS = 8
REQUEST_TIMEOUT_S = 5.0
REQUEST_DEADLINE_S = 10.0
_JSON = "application/json; charset=utf-8"
_TEXT = "text/plain; charset=utf-8"


class Monitor:
    """Serves /healthz, /status.json and /metrics from its own threads.

    Args:
        port: on 127.0.0.1; 0 takes a free one.
        status: what /status.json shows and /metrics counts; called in request threads.
        is_healthy: /healthz is 200 or 503.

    Attributes:
        url: such as ``http://127.0.0.1:9100``.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, port: int, status: Callable[[], dict[str, Any]], is_healthy: Callable[[], bool]) -> None:
        slots = threading.BoundedSemaphore(MAX_REQUESTS)

        class Handler(_Handler):
            def page(self) -> tuple[int, str, bytes]:
                if self.path == "/healthz":
                    return (200, _TEXT, b"ok\n") if is_healthy() else (503, _TEXT, b"a shard does not answer\n")
                if self.path == "/status.json":
                    return 200, _JSON, json.dumps(status()).encode()
                if self.path == "/metrics":
                    return 200, *render_metrics(status())
                return 404, _TEXT, b"there are /healthz, /status.json and /metrics\n"

        class HTTPServer(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 16

            def process_request(self, request: Any, client_address: Any) -> None:
                if not slots.acquire(blocking=False):
                    self.shutdown_request(request)  # more at once than anybody honest needs
                    return
                super().process_request(request, client_address)

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                # The handler's timeout is per read: one byte at a time would hold the slot for ever.
                clock = threading.Timer(REQUEST_DEADLINE_S, _cut, [request])
                clock.daemon = True
                clock.start()
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    clock.cancel()
                    slots.release()

            def handle_error(self, request: Any, client_address: Any) -> None:
                logger.debug("a status request failed", exc_info=True)

        self._server = HTTPServer((HOST, port), Handler)
        self.url = f"http://{HOST}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="psengine-monitor", daemon=True
        )

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_TIMEOUT_S
    server_version = "psengine"
    sys_version = ""

    def page(self) -> tuple[int, str, bytes]:
        """Status code, content type and content."""
        raise NotImplementedError

    def do_GET(self) -> None:
        self._answer(with_content=True)

    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def _answer(self, *, with_content: bool) -> None:
        try:
            code, kind, content = self.page()
        except MissingExtraError as error:
            code, kind, content = 501, _TEXT, f"{error}\n".encode()
        except Exception:
            logger.exception("no answer to %s", self.path)
            code, kind, content = 500, _TEXT, b"the server's log says why\n"
        self.close_connection = True
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if with_content:
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        logger.debug("status request: " + format, *arguments)


_COUNTERS = {
    "applied": "Pushes that changed weights, or were part of an average.",
    "averaged": "Exchanges of chunks that ended in an average.",
    "duplicates": "Repeats that were recognised and not applied again.",
    "late": "Contributions that came after their exchange had ended.",
    "abstained": "Exchanges a worker took part in without a gradient.",
    "evicted": "Workers whose lease ran out.",
    "bytes_in": "Payload bytes received.",
    "bytes_out": "Payload bytes sent.",
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
    workers = Gauge("psengine_workers", "Members.", labels=["job", "shard"])
    version = Gauge("psengine_version", "Updates the newest chunk has seen.", labels=["job", "shard"])
    pushes = Counter("psengine_pushes", "Pushes that arrived.", labels=["job", "shard", "worker"])
    refused = Counter("psengine_refused", "Pushes refused.", labels=["job", "shard", "reason"])
    for name, index, job in jobs:
        workers.add_metric([name, index], job["members"])
        version.add_metric([name, index], job["version_max"])
        for worker in job["workers"]:
            pushes.add_metric([name, index, str(worker["rank"])], worker["pushes"])
        for reason, count in job["refused"].items():
            refused.add_metric([name, index, reason], count)
    yield from (workers, version, pushes, refused)
    for name, text in _COUNTERS.items():
        family = Counter(f"psengine_{name}", text, labels=["job", "shard"])
        for job_name, index, job in jobs:
            family.add_metric([job_name, index], job.get(name, 0))
        yield family
    yield _histogram("psengine_staleness", "Updates between a push's weights and its application.", "staleness", jobs)
    yield _histogram("psengine_lead", "Steps an answered worker was ahead of the slowest.", "lead", jobs)
    yield from _snapshot_families(status["snapshot"])


def _histogram(name: str, text: str, field: str, jobs: list[tuple[str, str, dict[str, Any]]]) -> Any:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(name, text, labels=["job", "shard"])
    for job_name, index, job in jobs:
        counts = {int(key): count for key, count in job.get(field, {}).items()}
        bounds = [0, 1, 2, 4, 8, 16, 32, 63]
        buckets = [(str(float(b)), sum(c for key, c in counts.items() if key <= b)) for b in bounds]
        buckets.append(("+Inf", sum(counts.values())))
        family.add_metric([job_name, index], buckets, sum_value=sum(key * count for key, count in counts.items()))
    return family


def _snapshot_families(snapshot: dict[str, Any] | None) -> Iterable[Any]:
    from prometheus_client.core import CounterMetricFamily as Counter
    from prometheus_client.core import GaugeMetricFamily as Gauge

    if snapshot is None:
        return
    yield Gauge("psengine_snapshot_generation", "Durable to.", value=snapshot["generation"] or 0)
    if snapshot["age_s"] is not None:
        yield Gauge("psengine_snapshot_age_seconds", "Since the last was written.", value=snapshot["age_s"])
    yield Gauge("psengine_snapshot_seconds", "What the last one took.", value=snapshot["last_seconds"])
    yield Counter("psengine_snapshot_failures", "Snapshots not written.", value=snapshot["failures"])
