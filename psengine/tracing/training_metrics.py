"""Metrics of a training process for Prometheus, on a port of its own. Off unless PSENGINE_METRICS_PORT is set.

    wrapper: watch() ─► Telemetry, one for each wrapped model    rank 0 alone, which also opens the port, once
    reducer: step_ended(...) at the end of backward ────────┐
    user:    model.report(loss=..., samples=...) ───────────┴─► totals ◄── read at each request of /metrics

Rank 0's steps and waits stand for its group. Training goes on if the port cannot be opened.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Iterator
from typing import Any

from psengine.environment.launchers import read_integer
from psengine.environment.variables import inherited_variables, read_variable
from psengine.tracing.observers import observing
from psengine.tracing.stall_inspector import inspector
from psengine.tracing.telemetry import Telemetry

logger = logging.getLogger(__name__)

_HELP = {
    "steps": "Backwards whose gradients were exchanged.",
    "step_seconds": "Time of the steps after the first.",
    "wait_seconds": "Time in it in which this rank waited for the others' gradients and took the averages.",
    "exchanged_bytes": "Bytes of gradients that this rank gave to the exchange, before a codec.",
    "samples": "Samples that the script reported.",
    "stalls": "Waits for other ranks that were reported (PSENGINE_STALL_S).",
    "world_size": "Ranks of the group.",
    "loss": "What the script reported last.",
}


class TrainingMetrics:
    """The metrics of a process; a collector of prometheus_client.

    Attributes:
        models: each wrapped model's strategy, the ranks of its group, and its counters.
    """

    def __init__(self) -> None:
        self.models: list[tuple[str, int, Telemetry]] = []

    def collect(self) -> Iterator[Any]:
        """The metrics as they are now, for prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families = {
            name: (GaugeMetricFamily if name in ("world_size", "loss") else CounterMetricFamily)(
                f"psengine_training_{name}", text, labels=() if name == "stalls" else ("model", "strategy")
            )
            for name, text in _HELP.items()
        }
        families["stalls"].add_metric((), inspector.reported_stalls)
        for number, (strategy, world_size, telemetry) in enumerate(self.models):
            body = telemetry.to_body()
            values = {
                "steps": body["steps"],
                "step_seconds": body["step_s"],
                "wait_seconds": body["blocked_s"],
                "exchanged_bytes": telemetry.exchanged_bytes,
                "samples": body["samples"],
                "world_size": world_size,
            }
            if "loss" in body:
                values["loss"] = float("nan") if body["loss"] is None else body["loss"]
            for name, value in values.items():
                families[name].add_metric((str(number), strategy), value)
        yield from families.values()

    def render(self) -> tuple[int, str, bytes]:
        """The page for Prometheus."""
        from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

        return 200, CONTENT_TYPE_LATEST, generate_latest(self)

    def serve(self, port: int) -> None:
        """Serve them from now on, until the process ends; where the port cannot be opened, the log says so."""
        # An HTTP server is no part of a training that nobody watches.
        from psengine.status_port.http_status import LOOPBACK, TEXT, HttpStatus

        host = read_variable("PSENGINE_METRICS_BIND") or LOOPBACK
        pages = {"/metrics": self.render, "/healthz": lambda: (200, TEXT, b"ok\n")}
        with observing(f"metrics at {host}:{port}, PSENGINE_METRICS_PORT,"):
            served = HttpStatus(port, pages, host=host)
            atexit.register(served.__enter__().__exit__, None, None, None)
            if hasattr(os, "register_at_fork"):  # not on Windows
                os.register_at_fork(after_in_child=served.drop_copy)
            logger.warning("metrics of this training at %s/metrics", served.url)


_metrics = TrainingMetrics()


def watch(strategy: str, rank: int, world_size: int) -> Telemetry | None:
    """The counters of a model that is being wrapped; None where metrics are off, or on another rank than 0.

    Args:
        strategy: its name.
        rank: this process's.
        world_size: of its group.

    Raises:
        EnvironmentVariableError: PSENGINE_METRICS_PORT is no port.
    """
    port = read_integer(inherited_variables(), "PSENGINE_METRICS_PORT", 0, 2**16 - 1)
    if port is None or rank != 0:
        return None
    if not _metrics.models:
        _metrics.serve(port)
    telemetry = Telemetry()
    _metrics.models.append((strategy, world_size, telemetry))
    return telemetry
