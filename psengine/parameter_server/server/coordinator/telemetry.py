"""What a worker's steps are made of, as its heartbeats report them.

    worker   ├─ compute ─────┤├─ blocked: it waits for servers ─────────┤      step_s, blocked_s

Rates are taken over the last ``WINDOW_S``, or over two steps where these are longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from psengine.parameter_server.status_model import NOT_FINITE, WorkerTimes

WINDOW_S = 10.0


class WorkerTelemetry:
    """One worker's; ``times`` is what is known now, its seconds are means of a step."""

    def __init__(self) -> None:
        self.times = WorkerTimes()
        # Heartbeats that told of a new step, and when; a step's seconds are counted from the end of the first step on.
        self._heard: deque[tuple[float, Mapping[str, Any]]] = deque()

    def hear(self, body: Mapping[str, Any], now_s: float) -> None:
        """A heartbeat came; one without ``steps`` says nothing of them."""
        if "steps" not in body:
            return
        # A heartbeat says None of a loss that is not finite.
        loss = NOT_FINITE if "loss" in body and body["loss"] is None else body.get("loss")
        self.times = replace(self.times, steps=body["steps"], loss=loss)
        heard = self._heard
        if body["steps"] > (heard[-1][1]["steps"] if heard else 0):
            heard.append((now_s, body))
        while len(heard) > 2 and now_s - heard[1][0] >= WINDOW_S:
            heard.popleft()
        if len(heard) < 2 or now_s <= heard[0][0]:
            return
        (first_s, first), (_, last) = heard[0], heard[-1]
        gained = {name: last.get(name, 0) - first.get(name, 0) for name in ("steps", "samples", "step_s", "blocked_s")}
        found = {"steps_per_s": gained["steps"] / (now_s - first_s)}
        if last.get("samples"):
            found["samples_per_s"] = gained["samples"] / (now_s - first_s)
        for name in ("step_s", "blocked_s"):
            found[name] = gained[name] / gained["steps"]
        found["compute_s"] = found["step_s"] - found["blocked_s"]
        self.times = replace(self.times, **{name: round(value, 6) for name, value in found.items()})
