"""Metrics of a training process for Prometheus, on a port of its own. Off unless PSENGINE_METRICS_PORT is set.

    wrapper: watch() ─► Meter, one for each wrapped model     rank 0 alone, which also opens the port, once
    reducer: meter.step_ended(...) at the end of backward ──┐
    user:    model.report(loss=..., samples=...) ───────────┴─► counters and gauges of prometheus_client ─► /metrics

Rank 0's steps and waits stand for its group. Training goes on if the port cannot be opened.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from psengine.environment.variables import read_variable
from psengine.errors import EnvironmentVariableError
from psengine.tracing.stall_inspector import inspector
from psengine.tracing.telemetry import ReportedLoss, check_report

# Imported once it is used: an HTTP server is no part of a training that nobody watches.
if TYPE_CHECKING:
    from psengine.status_port.http_status import HttpStatus, Page

logger = logging.getLogger(__name__)

_COUNTERS = {
    "steps": "Backwards whose gradients were exchanged.",
    "step_seconds": "Time of the steps after the first.",
    "wait_seconds": "Time in it, at the end of backwards, in which this rank waited for the others and took their"
    " averages.",
    "exchanged_bytes": "Bytes of gradients that this rank gave to the exchange, before a codec.",
    "samples": "Samples that the script reported.",
}
_GAUGES = {"world_size": "Ranks of the group.", "loss": "What the script reported last."}


class Meter:
    """What is counted of one wrapped model.

    Args:
        families: by name, its metrics, which have two labels.
        labels: the model's number, and its strategy.
        knows_group: whether its workers are those of the process group.
    """

    def __init__(self, families: dict[str, Any], labels: tuple[str, str], *, knows_group: bool) -> None:
        self._families = families
        self._labels = labels
        self._counters = {name: families[name].labels(*labels) for name in _COUNTERS}
        self._world_size = families["world_size"].labels(*labels) if knows_group else None
        self._loss = ReportedLoss()
        self._last_end_s: float | None = None

    def step_ended(self, waited_s: float, exchanged_bytes: int, world_size: int) -> None:
        """A backward ended that exchanged ``exchanged_bytes`` of gradients and waited ``waited_s`` at its end."""
        now_s = time.monotonic()
        if self._last_end_s is not None:  # the time of the first step is not known, nor is it counted
            self._counters["step_seconds"].inc(now_s - self._last_end_s)
            self._counters["wait_seconds"].inc(waited_s)
        self._last_end_s = now_s
        self._counters["steps"].inc()
        self._counters["exchanged_bytes"].inc(exchanged_bytes)
        if self._world_size is not None:
            self._world_size.set(world_size)

    def report(self, loss: torch.Tensor | float | None = None, samples: int | None = None) -> None:
        """See ``Telemetry.report``."""
        check_report(loss, samples)
        self._counters["samples"].inc(int(samples or 0))
        if loss is not None:
            self._loss.put(loss)
            self._families["loss"].labels(*self._labels).set_function(self._read_loss)

    def _read_loss(self) -> float:
        value = self._loss.to_body().get("loss")
        return float("nan") if value is None else value


class TrainingMetrics:
    """The metrics of a process. Imports prometheus_client."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge

        self._registry = CollectorRegistry()
        self._families: dict[str, Any] = {}
        for kind, described in ((Counter, _COUNTERS), (Gauge, _GAUGES)):
            for name, text in described.items():
                metric = kind(f"psengine_training_{name}", text, ["model", "strategy"], registry=self._registry)
                self._families[name] = metric
        text = "Waits for other ranks that were reported (PSENGINE_STALL_S)."
        self._stalls = Counter("psengine_training_stalls", text, registry=self._registry)
        self._told_stalls = 0
        self._lock = threading.Lock()
        self._models = itertools.count()

    def meter(self, strategy: str, *, knows_group: bool) -> Meter:
        """The meter of one more model; see ``watch``."""
        return Meter(self._families, (str(next(self._models)), strategy), knows_group=knows_group)

    def render(self) -> Page:
        """The text for Prometheus."""
        from prometheus_client import generate_latest
        from prometheus_client.exposition import CONTENT_TYPE_LATEST

        with self._lock:
            told, self._told_stalls = self._told_stalls, inspector.reported_stalls
            self._stalls.inc(self._told_stalls - told)
        return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)

    def serve(self, port: int) -> HttpStatus | None:
        """Serve them from now on, until the process ends; where the port cannot be opened, the log says so."""
        from psengine.status_port.http_status import LOOPBACK, TEXT, HttpStatus

        host = read_variable("PSENGINE_METRICS_BIND") or LOOPBACK
        pages = {"/metrics": lambda query: self.render(), "/healthz": lambda query: (200, TEXT, b"ok\n")}
        try:
            served = HttpStatus(port, pages, host=host)
        except OSError as error:
            logger.warning(
                "no metrics: port %s:%d cannot be opened (%s); training goes on. Fix: another PSENGINE_METRICS_PORT,"
                " or 0 for a free one",
                host,
                port,
                error.strerror or error,
            )
            return None
        atexit.register(served.__enter__().__exit__, None, None, None)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=served.drop_copy)
        logger.warning("metrics of this training at %s/metrics", served.url)
        return served


_metrics: TrainingMetrics | None = None


def watch(strategy: str, rank: int, *, knows_group: bool) -> Meter | None:
    """A meter for a model that is being wrapped; None where metrics are off, or on another rank than 0.

    Args:
        strategy: its name.
        rank: this process's.
        knows_group: whether its workers are those of the process group.

    Raises:
        EnvironmentVariableError: PSENGINE_METRICS_PORT is no port.
    """
    global _metrics
    port = metrics_port()
    if port is None or rank != 0:
        return None
    if _metrics is None:
        _metrics = TrainingMetrics()
        _metrics.serve(port)
    return _metrics.meter(strategy, knows_group=knows_group)


def metrics_port() -> int | None:
    """PSENGINE_METRICS_PORT; None where it is not set.

    Raises:
        EnvironmentVariableError: it is no port.
    """
    text = (read_variable("PSENGINE_METRICS_PORT") or "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text) < 2**16):
        raise EnvironmentVariableError(
            f"PSENGINE_METRICS_PORT is the port of rank 0's metrics (expected 0 to 65535, 0 for a free one, got"
            f" {text!r}). Fix: leave it out for none."
        )
    return int(text)
