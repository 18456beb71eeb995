"""What a worker's steps are made of, as its heartbeats report them.

    worker   ├─ compute ─────┤├─ blocked: it waits for servers ─────────┤      step_s, blocked_s

Rates are taken over the last ``WINDOW_S`` between two heartbeats, or for as long as one step takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from psengine.parameter_server.status_model import NOT_FINITE, WorkerTimes

WINDOW_S = 10.0
MAX_WINDOW_S = 600.0


class _Sample(NamedTuple):
    """Totals at one heartbeat."""

    at_s: float
    steps: int
    step_s: float
    blocked_s: float
    samples: int


class WorkerTelemetry:
    """One worker's; ``times`` is what is known now, its seconds are means of a step."""

    def __init__(self) -> None:
        self.times = WorkerTimes()
        self._samples: deque[_Sample] = deque()

    def hear(self, body: Mapping[str, Any], now_s: float) -> None:
        """A heartbeat came; one without ``steps`` says nothing of them."""
        if "steps" not in body:
            return
        step_s, blocked_s = float(body.get("step_s", 0.0)), float(body.get("blocked_s", 0.0))
        sample = _Sample(now_s, body["steps"], step_s, blocked_s, body.get("samples", 0))
        # A heartbeat says None of a loss that is not finite.
        loss = NOT_FINITE if "loss" in body and body["loss"] is None else body.get("loss")
        self.times = replace(self.times, steps=sample.steps, loss=loss)
        samples = self._samples
        if samples and (sample.steps < samples[-1].steps or now_s < samples[-1].at_s):
            samples.clear()
        # A step's seconds are counted from the end of the first step on.
        if not sample.steps:
            return
        # In a long step only the first and the last heartbeat count.
        if len(samples) > 1 and samples[-2].steps == sample.steps:
            samples.pop()
        samples.append(sample)
        # The window begins later where it is still long enough then, with a step in it.
        while len(samples) > 2:
            length_s, steps = now_s - samples[1].at_s, sample.steps - samples[1].steps
            if length_s < WINDOW_S or (length_s < MAX_WINDOW_S and not steps):
                break
            samples.popleft()
        self._average(samples[0], sample)

    def _average(self, first: _Sample, last: _Sample) -> None:
        seconds, steps = last.at_s - first.at_s, last.steps - first.steps
        if seconds <= 0:
            return
        found: dict[str, Any] = {"steps_per_s": steps / seconds}
        if last.samples:
            found["samples_per_s"] = (last.samples - first.samples) / seconds
        if steps:
            for name in ("step_s", "blocked_s"):
                found[name] = (getattr(last, name) - getattr(first, name)) / steps
        self.times = replace(self.times, **{name: round(value, 6) for name, value in found.items()})
