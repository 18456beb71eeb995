"""A worker's counters, for people who watch: heartbeats carry them to servers, a port of its own to Prometheus.

    the worker's thread   with blocked(): wait_all(...)       step_ended()       report(loss=..., samples=...)
    the I/O thread                                  to_body(), with every heartbeat

Totals change at the end of a step, so that they belong together whenever they are read.
"""

from __future__ import annotations

import math
import numbers
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from psengine.errors import ConfigurationError
from psengine.protocol.messages import MAX_COUNTED
from psengine.tracing.observers import Observer

# A training loop may be so many steps ahead of its GPU.
MAX_COMING = 64


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
        self._steps = 0
        self._step_s = 0.0
        self._blocked_s = 0.0
        self._samples = 0
        self._unfinished_blocked_s = 0.0
        self._last_end_s = 0.0
        # The last loss that can be read, and those that a GPU has yet to compute.
        self._loss: _Loss | None = None
        self._pending: deque[_Loss] = deque()
        self._reading = Observer("at the servers, a loss that was reported")

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

    def was_blocked(self, seconds: float) -> None:
        """Of the step that ends next, this worker's training waited so long."""
        self._unfinished_blocked_s += seconds

    def step_ended(self) -> None:
        """A step is complete: its gradients are exchanged."""
        now_s = self._now_s()
        with self._lock:
            if self._steps:
                self._step_s += now_s - self._last_end_s
            self._last_end_s = now_s
            self._steps += 1
            self._blocked_s += self._unfinished_blocked_s
            self._unfinished_blocked_s = 0.0

    def report(self, loss: torch.Tensor | float | None = None, samples: int | None = None) -> None:
        """Take numbers from the user's training loop. Never waits for a device.

        Args:
            loss: of this step, one number; None leaves the last.
            samples: how many this step had; they are added up.

        Raises:
            ConfigurationError: the loss is not one number, or the samples are no number of samples.
        """
        _check(loss, samples)
        with self._lock:
            self._samples = min(self._samples + int(samples or 0), MAX_COUNTED)
        if loss is not None:
            with self._reading:
                self._queue(_Loss(loss))

    def _queue(self, loss: _Loss) -> None:
        with self._lock:
            if len(self._pending) >= MAX_COMING:
                self._pending.pop()  # an older one is readable sooner
            self._pending.append(loss)
            self._advance()

    def _advance(self) -> None:
        while self._pending and self._pending[0].is_there():
            self._loss = self._pending.popleft()

    def to_body(self) -> dict[str, Any]:
        """HEARTBEAT's body: without "loss" until one was reported; None is one that is not finite."""
        with self._lock:
            body: dict[str, Any] = {
                "steps": self._steps,
                "step_s": self._step_s,
                "blocked_s": self._blocked_s,
                "samples": self._samples,
            }
            with self._reading:
                self._advance()
            loss = self._loss
        if loss is not None:
            with self._reading:
                body["loss"] = loss.read()
        return body


class _Loss:
    """A reported loss: on the CPU, or on its way there behind the stream that computes it."""

    def __init__(self, loss: torch.Tensor | float) -> None:
        self._event: Any = None
        if isinstance(loss, torch.Tensor) and loss.is_cuda:
            # To pinned memory, so that the stream waits for the copy and the caller does not.
            self._value: torch.Tensor | float = torch.empty(loss.shape, dtype=loss.dtype, pin_memory=True)
            with torch.cuda.device(loss.device):
                self._value.copy_(loss.detach(), non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record()
        elif isinstance(loss, torch.Tensor) and loss.device.type != "cpu":
            self._value = loss.detach()
        else:
            self._value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def is_there(self) -> bool:
        """Whether it can be read without waiting for long."""
        return self._event is None or bool(self._event.query())

    def read(self) -> float | None:
        """The number; None where it is not finite. On devices other than CUDA's it is waited for here."""
        value = float(self._value)
        return value if math.isfinite(value) else None


def _check(loss: Any, samples: Any) -> None:
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
