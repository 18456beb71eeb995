"""What a worker counts of itself; its heartbeats carry it to the servers, for people who watch.

    the worker's thread   with blocked(): wait_all(...)       step_ended()       report(loss=..., samples=...)
    the I/O thread                                  to_body(), with every heartbeat

Totals change at the end of a step, so that they belong together whenever they are read.
"""

from __future__ import annotations

import math
import numbers
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from psengine.errors import ConfigurationError
from psengine.protocol.bodies import MAX_COUNTED
from psengine.tracing.observers import Observer

# A training loop may be so many steps ahead of its GPU.
MAX_COMING = 64


class Telemetry:
    """One worker's; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps = 0
        self._step_s = 0.0
        self._blocked_s = 0.0
        self._samples = 0
        self._unfinished_blocked_s = 0.0
        self._last_end_s = 0.0
        # The last loss that can be read, and those that a GPU has yet to compute.
        self._loss: _Loss | None = None
        self._coming: deque[_Loss] = deque()
        self._reading = Observer("at the servers, a loss that was reported")

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Inside, this worker's training waits for servers."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._unfinished_blocked_s += time.monotonic() - began_s

    def step_ended(self) -> None:
        """A step is complete: its gradients are exchanged."""
        now_s = time.monotonic()
        with self._lock:
            if self._steps:
                self._step_s += now_s - self._last_end_s
            self._last_end_s = now_s
            self._steps += 1
            self._blocked_s += self._unfinished_blocked_s
            self._unfinished_blocked_s = 0.0

    def report(self, loss: torch.Tensor | float | None = None, samples: int | None = None) -> None:
        """What the user's loop knows. Never waits for a device.

        Args:
            loss: of this step, one number; None leaves the last.
            samples: how many this step had, to be added up.

        Raises:
            ConfigurationError: the loss is not one number, or the samples are no number of samples.
        """
        _check_samples(samples)
        found = None
        if loss is not None:
            _check_loss(loss)
            with self._reading:
                found = _take(loss)
        with self._lock:
            self._samples = min(self._samples + int(samples or 0), MAX_COUNTED)
        if found is not None:
            self._queue(found)

    def _queue(self, loss: _Loss) -> None:
        with self._lock:
            if len(self._coming) >= MAX_COMING:
                self._coming.pop()  # an older one is there sooner
            self._coming.append(loss)
            self._advance()

    def _advance(self) -> None:
        with self._reading:
            while self._coming and self._coming[0].is_there():
                self._loss = self._coming.popleft()

    def to_body(self) -> dict[str, Any]:
        """HEARTBEAT's body: without "loss" until one was reported; None is one that is not finite."""
        with self._lock:
            body: dict[str, Any] = {
                "steps": self._steps,
                "step_s": self._step_s,
                "blocked_s": self._blocked_s,
                "samples": self._samples,
            }
            self._advance()
            loss = self._loss
        if loss is not None:
            with self._reading:
                body["loss"] = loss.read()
        return body


class _Loss(Protocol):
    def is_there(self) -> bool:
        """Whether it can be read without waiting for long."""

    def read(self) -> float | None:
        """The number; None where it is not finite."""


class _Known:
    def __init__(self, value: float) -> None:
        self._value = value if math.isfinite(value) else None

    def is_there(self) -> bool:
        return True

    def read(self) -> float | None:
        return self._value


class _OnItsWay:
    """A loss that a GPU has yet to compute: copied when it is there, read when the copy is."""

    def __init__(self, loss: torch.Tensor) -> None:
        # To pinned memory, so that the copy waits in the stream and not here.
        self._copy = torch.empty(loss.shape, dtype=loss.dtype, pin_memory=True)
        with torch.cuda.device(loss.device):
            self._copy.copy_(loss, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def is_there(self) -> bool:
        return bool(self._event.query())

    def read(self) -> float | None:
        return _Known(float(self._copy)).read()


class _Elsewhere:
    """A loss on a device without streams that we know: read, and waited for, by the I/O thread."""

    def __init__(self, loss: torch.Tensor) -> None:
        self._loss = loss

    def is_there(self) -> bool:
        return True

    def read(self) -> float | None:
        return _Known(float(self._loss)).read()


# NumPy's numbers are numbers too.


def _check_samples(samples: Any) -> None:
    is_number = isinstance(samples, numbers.Integral) and not isinstance(samples, bool)
    if samples is not None and (not is_number or samples < 0):
        raise ConfigurationError(f"samples is a number of samples (expected an integer >= 0, got {samples!r})")


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor):
        if isinstance(loss, bool) or not isinstance(loss, numbers.Real):
            raise ConfigurationError(
                f"loss is one number (expected a float or a tensor of one element, got {type(loss).__name__})"
            )
    elif loss.numel() != 1 or loss.is_complex():
        raise ConfigurationError(
            f"loss is one number (expected a float or a real tensor of one element, got shape {tuple(loss.shape)} of"
            f" {loss.dtype}). Fix: report(loss=loss.mean())."
        )


def _take(loss: torch.Tensor | float) -> _Loss:
    if not isinstance(loss, torch.Tensor):
        return _Known(float(loss))
    detached = loss.detach()
    if detached.device.type == "cpu":
        return _Known(float(detached))
    return _OnItsWay(detached) if detached.device.type == "cuda" else _Elsewhere(detached)
