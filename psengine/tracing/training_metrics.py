"""Metrics of a training process for Prometheus, on a port of its own. Off unless PSENGINE_METRICS_PORT is set.

    wrapper: watch() ─► Meter, one for each wrapped model     rank 0 alone, which also opens the port, once
    reducer: meter.step_ended(...) at the end of backward ──┐
    user:    model.report(loss=..., samples=...) ───────────┴─► /metrics, made when Prometheus asks

One rank speaks for its group: steps and waits are its own. A port that cannot be opened does not end training.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from psengine.environment.variables import read_variable
from psengine.errors import ConfigurationError, EnvironmentVariableError
from psengine.tracing.stall_inspector import inspector
from psengine.tracing.telemetry import Telemetry

# Imported once it is used: an HTTP server and TLS are no part of a training that nobody watches.
if TYPE_CHECKING:
    from psengine.status_port.port import Page, StatusPort

logger = logging.getLogger(__name__)


class Meter:
    """What is counted of one wrapped model.

    Args:
        strategy: its name.
        knows_group: whether its workers are those of the process group.

    Attributes:
        world_size: of the group in the last step; None before it, and without a group.
    """

    def __init__(self, strategy: str, *, knows_group: bool) -> None:
        self.strategy = strategy
        self.world_size: int | None = None
        self._knows_group = knows_group
        self.exchanged_bytes = 0
        self._has_stepped = False
        self._telemetry = Telemetry(time.monotonic)

    def step_ended(self, waited_s: float, exchanged_bytes: int, world_size: int) -> None:
        """A backward ended whose gradients were exchanged: so many bytes of them, with so long a wait at its end."""
        self.world_size = world_size if self._knows_group else None
        if self._has_stepped:  # the time of the first step is not known, nor is it counted
            self._telemetry.was_blocked(waited_s)
        self._has_stepped = True
        self._telemetry.step_ended()
        self.exchanged_bytes += exchanged_bytes

    def report(self, loss: torch.Tensor | float | None = None, samples: int | None = None) -> None:
        """See ``Telemetry.report``."""
        self._telemetry.report(loss=loss, samples=samples)

    def totals(self) -> dict[str, Any]:
        """See ``Telemetry.to_body``; and what is counted here."""
        own = {"exchanged_bytes": self.exchanged_bytes, "world_size": self.world_size}
        return {**self._telemetry.to_body(), **own}


class TrainingMetrics:
    """The meters of a process and its port; there is one, ``metrics``."""

    def __init__(self) -> None:
        self._meters: weakref.WeakValueDictionary[int, Meter] = weakref.WeakValueDictionary()
        self._port: StatusPort | None = None
        self._has_tried = False
        self._count = 0
        self._lock = threading.Lock()

    def watch(self, strategy: str, rank: int, *, knows_group: bool) -> Meter | None:
        """A meter for a model that is being wrapped; None where metrics are off, or another rank speaks.

        The arguments are those of ``Meter``, and this process's rank.

        Raises:
            EnvironmentVariableError, ConfigurationError: a variable is wrong, a file is no good.
        """
        port = metrics_port()
        if port is None or rank != 0:
            return None
        with self._lock:
            if not self._has_tried:
                self._open(port)
            meter = Meter(strategy, knows_group=knows_group)
            self._meters[self._count] = meter
            self._count += 1
        return meter

    def render(self) -> Page:
        """The text for Prometheus."""
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.exposition import CONTENT_TYPE_LATEST

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_collector(sorted(self._meters.items())))
        return 200, CONTENT_TYPE_LATEST, generate_latest(registry)

    def close(self) -> None:
        """Close the port; the next ``watch`` opens it again."""
        with self._lock:
            port, self._port, self._has_tried = self._port, None, False
        if port is not None:
            port.__exit__(None, None, None)

    def _open(self, port: int) -> None:
        from psengine.status_port.access import read_access
        from psengine.status_port.certificate import load_certificate
        from psengine.status_port.port import LOOPBACK, TEXT, Pages, StatusPort

        host = read_variable("PSENGINE_METRICS_BIND") or LOOPBACK
        certificate, key, read_token = map(
            _path_in, ("PSENGINE_STATUS_CERT", "PSENGINE_STATUS_KEY", "PSENGINE_STATUS_READ_TOKEN")
        )
        if (certificate is None) != (key is None):
            raise ConfigurationError("PSENGINE_STATUS_CERT and PSENGINE_STATUS_KEY belong together (got one of them)")
        access = read_access(host, token=None, read_token=read_token, has_certificate=certificate is not None)
        tls = None if certificate is None or key is None else load_certificate(certificate, key)
        self._has_tried = True
        try:
            pages = Pages({"/metrics": self.render, "/healthz": lambda: (200, TEXT, b"ok\n")})
            self._port = StatusPort(port, pages, host=host, access=access, tls=tls)
        except OSError as error:
            logger.warning(
                "no metrics: port %s:%d cannot be opened (%s); training goes on. Fix: another PSENGINE_METRICS_PORT,"
                " or 0 for a free one",
                host,
                port,
                error.strerror or error,
            )
            return
        self._port.__enter__()
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)
        logger.warning("metrics of this training at %s/metrics", self._port.url)

    def _forget(self) -> None:
        """In a forked child, such as a data loader's worker: the port is the parent's."""
        if self._port is not None:
            self._port.drop_copy()
        self._port, self._has_tried, self._lock = None, True, threading.Lock()


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


def _path_in(variable: str) -> Path | None:
    text = read_variable(variable)
    return Path(text).expanduser() if text else None


# By metric: its explanation, and its member of ``Meter.totals``.
_COUNTERS = {
    "steps": ("Backwards whose gradients were exchanged.", "steps"),
    "step_seconds": ("Time of the steps after the first.", "step_s"),
    "wait_seconds": (
        "Time in it, at the end of backwards, in which this rank waited for the others and took their averages.",
        "blocked_s",
    ),
    "exchanged_bytes": ("Bytes of gradients that this rank gave to the exchange, before a codec.", "exchanged_bytes"),
    "samples": ("Samples that the script reported.", "samples"),
}
_LABELS = ["model", "strategy"]


def _collector(meters: Iterable[tuple[int, Meter]]) -> Any:
    """What prometheus-client asks; holds numbers, and no meter."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector

    found = [([str(index), meter.strategy], meter.totals()) for index, meter in meters]

    class MeterCollector(Collector):
        def collect(self) -> Iterable[Any]:
            for name, (text, member) in _COUNTERS.items():
                family = CounterMetricFamily(f"psengine_training_{name}", text, labels=_LABELS)
                for labels, totals in found:
                    family.add_metric(labels, totals[member])
                yield family
            world = GaugeMetricFamily("psengine_training_world_size", "Ranks of the group.", labels=_LABELS)
            loss = GaugeMetricFamily("psengine_training_loss", "What the script reported last.", labels=_LABELS)
            for labels, totals in found:
                if totals["world_size"] is not None:
                    world.add_metric(labels, totals["world_size"])
                if "loss" in totals:  # None is one that is not finite
                    loss.add_metric(labels, float("nan") if totals["loss"] is None else totals["loss"])
            yield world
            yield loss
            text = "Waits for other ranks that were reported (PSENGINE_STALL_S)."
            stalls = CounterMetricFamily("psengine_training_stalls", text)
            stalls.add_metric([], inspector.reported_stalls)
            yield stalls

    return MeterCollector()


metrics = TrainingMetrics()
