"""A worker's counters, which its heartbeats carry to the servers; and the loss that a training loop reports.

    the worker's thread   with blocked(): wait_all(...)       step_ended()       report(loss=..., samples=...)
    the I/O thread                                  to_body(), with every heartbeat

Totals change at the end of a step, so that they belong together whenever they are read.
"""

from __future__ import annotations

import math
import numbers
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from psengine.errors import ConfigurationError
from psengine.protocol.messages import MAX_COUNTED
from psengine.tracing.observers import Observer


class ReportedLoss:
    """The latest reported loss that its device has computed. Nobody waits for a device here; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value: float | None = None
        self._coming: tuple[torch.Tensor, torch.Event] | None = None
        self._observer = Observer("among the reported numbers, a loss")

    def put(self, loss: torch.Tensor | float) -> None:
        """Take a loss that ``check_report`` passed. It is dropped while the device still computes an earlier one."""
        with self._lock, self._observer:
            if not isinstance(loss, torch.Tensor) or loss.device.type == "cpu":
                self._value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
                self._coming = None
                return
            self._settle()
            if self._coming is None:
                event = torch.Event(loss.device)
                # A copy to pinned memory, for which the stream waits and the caller does not.
                copy = loss.detach().to("cpu", non_blocking=True, copy=True)
                event.record(torch.accelerator.current_stream(loss.device))
                self._coming = copy, event

    def to_body(self) -> dict[str, float | None]:
        """``{"loss": number}``, None for one that is not finite; empty before the first."""
        with self._lock:
            self._settle()
            if self._value is None:
                return {}
            return {"loss": self._value if math.isfinite(self._value) else None}

    def _settle(self) -> None:
        if self._coming is not None and self._coming[1].query():
            self._value, self._coming = float(self._coming[0]), None


class Telemetry:
    """One worker's; thread-safe.

    Args:
        now_s: a clock that never goes back.

    Attributes:
        is_blocked: this worker's training waits for servers, and has pushed all that it can before it has answers.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.is_blocked = False
        self._now_s = now_s
        self._lock = threading.Lock()
        self._totals: dict[str, Any] = {"steps": 0, "step_s": 0.0, "blocked_s": 0.0, "samples": 0}
        self._unfinished_blocked_s = 0.0
        self._last_end_s = 0.0
        self._loss = ReportedLoss()

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Inside, this worker's training waits for servers."""
        began_s = self._now_s()
        self.is_blocked = True
        try:
            yield
        finally:
            self.is_blocked = False
            self._unfinished_blocked_s += self._now_s() - began_s

    def step_ended(self) -> None:
        """A step is complete: its gradients are exchanged."""
        now_s = self._now_s()
        with self._lock:
            if self._totals["steps"]:
                self._totals["step_s"] += now_s - self._last_end_s
            self._last_end_s = now_s
            self._totals["steps"] += 1
            self._totals["blocked_s"] += self._unfinished_blocked_s
            self._unfinished_blocked_s = 0.0

    def report(self, loss: torch.Tensor | float | None = None, samples: int | None = None) -> None:
        """Take numbers from the user's training loop. Never waits for a device.

        Args:
            loss: of this step, one number; None leaves the last.
            samples: how many this step had; they are added up.

        Raises:
            ConfigurationError: the loss is not one number, or the samples are no number of samples.
        """
        check_report(loss, samples)
        with self._lock:
            self._totals["samples"] = min(self._totals["samples"] + int(samples or 0), MAX_COUNTED)
        if loss is not None:
            self._loss.put(loss)

    def to_body(self) -> dict[str, Any]:
        """HEARTBEAT's body: without "loss" until one was reported; None is one that is not finite."""
        with self._lock:
            return {**self._totals, **self._loss.to_body()}


def check_report(loss: Any, samples: Any) -> None:
    """Check what a training loop reports.

    Raises:
        ConfigurationError: the loss is not one number, or the samples are no number of samples.
    """
    # NumPy's numbers are numbers too.
    is_count = isinstance(samples, numbers.Integral) and not isinstance(samples, bool)
    if samples is not None and (not is_count or samples < 0):
        raise ConfigurationError(f"samples is a number of samples (expected an integer >= 0, got {samples!r})")
    if isinstance(loss, torch.Tensor):
        if loss.numel() != 1 or loss.is_complex():
            raise ConfigurationError(
                "loss is one number (expected a float or a real tensor of one element, got shape"
                f" {tuple(loss.shape)} of {loss.dtype}). Fix: report(loss=loss.mean())."
            )
    elif loss is not None and (isinstance(loss, bool) or not isinstance(loss, numbers.Real)):
        raise ConfigurationError(
            f"loss is one number (expected a float or a tensor of one element, got {type(loss).__name__})"
        )
