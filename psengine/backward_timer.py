"""Where the time of an iteration goes, sampled: forward, backward, exchange and their overlap."""

from __future__ import annotations

import time

# The first iterations are all timed, later ones sparsely: native DDP's rule (kDDPRuntimeLoggingSampleRate).
ALWAYS_SAMPLED_ITERATIONS = 10
DEFAULT_SAMPLE_RATE = 100


class BackwardTimer:
    """Host times of one iteration in nanoseconds since the epoch, recorded in sampled iterations only.

    On CUDA these are times of launching, not of computing; native DDP's events are not rebuilt here.
    """

    def __init__(self) -> None:
        self.sample_rate = DEFAULT_SAMPLE_RATE
        self.iteration = 0
        self.is_sampling = False
        self._marks_ns: dict[str, int] = {}
        self._totals_ns: dict[str, int] = {}
        self._samples = 0
        self._last: dict[str, int] = {}

    def start_forward(self, iteration: int) -> None:
        """A forward begins; publishes the times of the one before, if it was sampled."""
        self._publish()
        self.is_sampling = iteration <= ALWAYS_SAMPLED_ITERATIONS or iteration % self.sample_rate == 0
        if self.is_sampling:
            self.iteration = iteration
            self._marks_ns = {"forward_compute_time_start": time.time_ns()}

    def start_backward(self) -> None:
        """The forward is over, backward may begin."""
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

    def _publish(self) -> None:
        marks = self._marks_ns
        if not self.is_sampling or "backward_comm_time_end" not in marks:
            return
        forward_start, backward_start = marks["forward_compute_time_start"], marks["backward_compute_time_start"]
        backward_end, communication_end = marks["backward_compute_time_end"], marks["backward_comm_time_end"]
        communication_start = marks.get("backward_comm_time_start", backward_end)
        durations = {
            "forward_compute_time": backward_start - forward_start,
            "backward_compute_time": backward_end - backward_start,
            "backward_comm_time": communication_end - communication_start,
            "backward_compute_comm_overlap_time": max(0, backward_end - communication_start),
        }
        self._samples += 1
        for name, duration_ns in durations.items():
            self._totals_ns[name] = self._totals_ns.get(name, 0) + duration_ns
        averages = {f"avg_{name}": total // self._samples for name, total in self._totals_ns.items()}
        self._last = {**averages, **durations, **marks, "iteration": self.iteration}
        self._marks_ns = {}

    def snapshot(self) -> dict[str, int]:
        """The last but one sampled iteration's times and the averages over all until then, in nanoseconds.

        An iteration is published when the next one begins, as native DDP does.
        """
        return dict(self._last)
