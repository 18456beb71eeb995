"""Where the time of an iteration goes, sampled: forward, backward, exchange and their overlap.

    start_forward ─ start_backward ─ start_communication ─ end_backward ─ end_communication ─ start_forward
                    a record begins                                                           it is published

A record begins with a complete forward; one that raises, or repeats another for checkpointing, leaves none. A record
that is incomplete when the next forward begins is not published then.
"""

from __future__ import annotations

import time
from collections import Counter

# The first iterations are all timed, later ones sparsely: native DDP's rule (kDDPRuntimeLoggingSampleRate).
ALWAYS_SAMPLED_ITERATIONS = 10
DEFAULT_SAMPLE_RATE = 100

_NEEDED_MARKS = {"backward_comm_time_start", "backward_compute_time_end", "backward_comm_time_end"}


class BackwardTimer:
    """Host times of one iteration in nanoseconds since the epoch, recorded in sampled iterations only.

    On CUDA these are times of launching, not of computing. Methods may be called in any order: a program may leave a
    forward or backward half-way.

    Attributes:
        is_sampling: whether the iteration whose backward is expected, or under way, is being timed.
    """

    def __init__(self) -> None:
        self.sample_rate = DEFAULT_SAMPLE_RATE
        self.is_sampling = False
        self._forward = (0, 0)  # the latest: its iteration, and its start
        self._marks_ns: dict[str, int] = {}  # of the iteration that is being timed
        self._totals_ns: Counter[str] = Counter()
        self._last: dict[str, int] = {}

    def start_forward(self, iteration: int) -> None:
        """A forward begins; publishes the times of the iteration before, if it was sampled and is complete."""
        if self.is_sampling and self._marks_ns.keys() >= _NEEDED_MARKS:
            self.is_sampling = False
            self._publish(self._marks_ns)
        self._forward = (iteration, time.time_ns())

    def start_backward(self) -> None:
        """The forward is over, backward may begin."""
        iteration, started_ns = self._forward
        self.is_sampling = iteration <= ALWAYS_SAMPLED_ITERATIONS or iteration % self.sample_rate == 0
        if self.is_sampling:
            self._marks_ns = {"iteration": iteration, "forward_compute_time_start": started_ns}
            self._mark("backward_compute_time_start")

    def start_communication(self) -> None:
        """The first bucket is handed over."""
        self._mark("backward_comm_time_start")

    def end_backward(self) -> None:
        """All gradients are computed; what remains is waiting."""
        self._mark("backward_compute_time_end")

    def end_communication(self) -> None:
        """All gradients are averaged."""
        self._mark("backward_comm_time_end")

    def _mark(self, name: str) -> None:
        if self.is_sampling:
            self._marks_ns[name] = time.time_ns()

    def _publish(self, marks: dict[str, int]) -> None:
        backward_start, backward_end = marks["backward_compute_time_start"], marks["backward_compute_time_end"]
        communication_start = marks["backward_comm_time_start"]
        durations = {
            "forward_compute_time": backward_start - marks["forward_compute_time_start"],
            "backward_compute_time": backward_end - backward_start,
            "backward_comm_time": marks["backward_comm_time_end"] - communication_start,
            "backward_compute_comm_overlap_time": max(0, backward_end - communication_start),
        }
        if min(durations.values()) < 0:
            return  # the clock was set back
        self._totals_ns.update({**durations, "samples": 1})
        averages = {f"avg_{name}": self._totals_ns[name] // self._totals_ns["samples"] for name in durations}
        self._last = {**averages, **durations, **marks}

    def snapshot(self) -> dict[str, int]:
        """Times of the latest published iteration and averages over all until then, in nanoseconds.

        An iteration is published when the next one begins, as in native DDP.
        """
        return dict(self._last)
