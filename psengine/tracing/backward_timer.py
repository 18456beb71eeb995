"""Where the time of an iteration goes, sampled: forward, backward, exchange and their overlap.

    start ─ backward_compute_time_start ─ backward_comm_time_start ─ backward_compute_time_end ─ backward_comm_time_end

An iteration is published when the next one starts, as in native DDP. A record begins with a complete forward; one that
raises, or repeats another for checkpointing, leaves none. A record that is incomplete then is not published.
"""

from __future__ import annotations

import time
from collections import Counter

# The first iterations are all timed, later ones sparsely: native DDP's rule (kDDPRuntimeLoggingSampleRate).
ALWAYS_SAMPLED_ITERATIONS = 10
DEFAULT_SAMPLE_RATE = 100

_OVERLAP = "backward_compute_comm_overlap_time"
# What the moments that the reducer names (backwards.py) are called in the logging data.
_MARKS = {
    "expected": "backward_compute_time_start",
    "turn": "backward_comm_time_start",
    "landing": "backward_compute_time_end",
    "landed": "backward_comm_time_end",
}
# Each duration's first and last mark.
_DURATIONS = {
    "forward_compute_time": ("forward_compute_time_start", _MARKS["expected"]),
    "backward_compute_time": (_MARKS["expected"], "backward_compute_time_end"),
    "backward_comm_time": ("backward_comm_time_start", "backward_comm_time_end"),
    _OVERLAP: ("backward_comm_time_start", "backward_compute_time_end"),
}


class BackwardTimer:
    """Host times of one iteration in nanoseconds since the epoch, recorded in sampled iterations only.

    On CUDA these are times of launching, not of computing. Methods may be called in any order: a program may leave a
    forward or backward half-way.

    Attributes:
        is_sampling: whether the iteration whose backward is expected, or under way, is being timed.
        published: times of the latest published iteration and averages over all until then, in nanoseconds.
    """

    def __init__(self) -> None:
        self.sample_rate = DEFAULT_SAMPLE_RATE
        self.is_sampling = False
        self.published: dict[str, int] = {}
        self._forward = {"iteration": 0, "forward_compute_time_start": 0}  # the latest
        self._marks = self._forward  # of the iteration that is being timed
        self._totals: Counter[str] = Counter()

    def start(self, iteration: int) -> None:
        """A forward begins; publishes the iteration before, if it was sampled and is complete."""
        if self.is_sampling and all(mark in self._marks for marks in _DURATIONS.values() for mark in marks):
            self.is_sampling = False
            durations = {name: self._marks[last] - self._marks[first] for name, (first, last) in _DURATIONS.items()}
            durations[_OVERLAP] = max(0, durations[_OVERLAP])
            if min(durations.values()) >= 0:  # else the clock was set back
                self._totals.update({**durations, "samples": 1})
                averages = {f"avg_{name}": self._totals[name] // self._totals["samples"] for name in durations}
                self.published = {**averages, **durations, **self._marks}
        self._forward = {"iteration": iteration, "forward_compute_time_start": time.time_ns()}

    def begin_backward(self) -> bool:
        """The forward has ended; return whether the iteration is sampled."""
        iteration = self._forward["iteration"]
        self.is_sampling = iteration <= ALWAYS_SAMPLED_ITERATIONS or iteration % self.sample_rate == 0
        self._marks = dict(self._forward)
        return self.is_sampling

    def mark(self, moment: str, *_: object) -> None:
        """A moment of a sampled backward has come; of several alike the first counts."""
        name = _MARKS.get(moment)
        if name is not None:
            self._marks.setdefault(name, time.time_ns())
