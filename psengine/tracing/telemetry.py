"""A worker's counters, for heartbeats to its servers and for Prometheus; and the loss that a training loop reports.

    the worker's thread   with blocked(): wait_all(...)       step_ended()       report(loss=..., samples=...)
    the I/O thread                                  to_body(), with every heartbeat

Totals change at the end of a step, so that they belong together whenever they are read.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from psengine.protocol.messages import MAX_COUNTED
from psengine.tracing.observers import observing


class Telemetry:
    """What is counted of one model; thread-safe.

    Args:
        now_s: a clock that never goes back.

    Attributes:
        is_blocked: this worker's training waits for servers, and has pushed all that it can before it has answers.
        exchanged_bytes: of gradients; counted for Prometheus alone.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.is_blocked = False
        self.exchanged_bytes = 0
        self._now_s = now_s
        self._lock = threading.Lock()
        self._totals: dict[str, Any] = {"steps": 0, "step_s": 0.0, "blocked_s": 0.0, "samples": 0}
        self._unfinished_blocked_s = 0.0
        self._last_end_s = 0.0
        self._loss: float | None = None
        self._coming_loss: tuple[torch.Tensor, torch.Event] | None = None

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

    def step_ended(self, waited_s: float = 0.0) -> None:
        """A step is complete: its gradients are exchanged. ``waited_s`` is added to the time inside ``blocked``."""
        now_s = self._now_s()
        with self._lock:
            if self._totals["steps"]:  # the first step's length is not known
                self._totals["step_s"] += now_s - self._last_end_s
                self._totals["blocked_s"] += self._unfinished_blocked_s + waited_s
            self._unfinished_blocked_s = 0.0
            self._last_end_s = now_s
            self._totals["steps"] += 1

    def report(self, loss: torch.Tensor | float | None = None, samples: int | None = None) -> None:
        """Take numbers from the user's training loop. Never waits for a device; what is no number is logged.

        Args:
            loss: of this step, one number; None leaves the last. It is dropped while its device computes an earlier.
            samples: how many this step had; they are added up.
        """
        with self._lock, observing("of what was reported, a loss or a number of samples"):
            counted = self._totals["samples"] + max(0, int(samples or 0))
            self._totals["samples"] = min(counted, MAX_COUNTED)
            if isinstance(loss, torch.Tensor) and loss.device.type != "cpu":
                self._settle_loss()
                if self._coming_loss is None:
                    event = torch.Event(loss.device)
                    # A copy to pinned memory, for which the stream waits and the caller does not.
                    copy = loss.detach().real.reshape(()).to("cpu", non_blocking=True, copy=True)
                    event.record(torch.accelerator.current_stream(loss.device))
                    self._coming_loss = copy, event
            elif loss is not None:
                self._loss = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
                self._coming_loss = None

    def to_body(self) -> dict[str, Any]:
        """HEARTBEAT's body: without "loss" until one was reported; None is one that is not finite."""
        with self._lock:
            self._settle_loss()
            if self._loss is None:
                return dict(self._totals)
            return {**self._totals, "loss": self._loss if math.isfinite(self._loss) else None}

    def _settle_loss(self) -> None:
        if self._coming_loss is not None and self._coming_loss[1].query():
            self._loss, self._coming_loss = float(self._coming_loss[0]), None
