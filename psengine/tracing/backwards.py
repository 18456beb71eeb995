"""What happens in a model's backwards, for those who watch: timeline, logging data, Prometheus.

The reducer names each moment, and mostly nobody listens::

    expected   the forward has ended                    landing   all buckets were handed over, backward is over
    turn       of a bucket, whose gradients have come   wait      for a bucket's result
    pack       a bucket, or one large gradient of it    unpack    the result to gradients
    packed     that gradient                            written   all of a bucket that there is to write
    exchange   of a bucket begins                       landed    the step's gradients are complete
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from psengine.tensors.bucket import Bucket
from psengine.tracing.telemetry import Telemetry
from psengine.tracing.timeline import EXCHANGE, Span, recorder, span

Observe = Callable[..., None]

# The first iterations are all timed, later ones sparsely: native DDP's rule (kDDPRuntimeLoggingSampleRate).
ALWAYS_SAMPLED_ITERATIONS = 10

_OVERLAP = "backward_compute_comm_overlap_time"
# What the moments are called in the logging data.
_MARKS = {
    "expected": "backward_compute_time_start",
    "turn": "backward_comm_time_start",
    "landing": "backward_compute_time_end",
    "landed": "backward_comm_time_end",
}
# Each duration's first and last mark.
_DURATIONS = {
    "forward_compute_time": ("forward_compute_time_start", "backward_compute_time_start"),
    "backward_compute_time": ("backward_compute_time_start", "backward_compute_time_end"),
    "backward_comm_time": ("backward_comm_time_start", "backward_comm_time_end"),
    _OVERLAP: ("backward_comm_time_start", "backward_compute_time_end"),
}


class Backwards:
    """Who watches one model. A program may leave a forward or backward half-way.

    Args:
        exchange_name: what a timeline calls the exchange of a bucket.

    Attributes:
        meter: counts steps for Prometheus; None where nobody does.
        sample_rate: of so many iterations one is timed for the logging data.
        is_sampling: whether the iteration whose backward is expected, or under way, is being timed.
        published: the host's times of the latest iteration that was timed and complete when the next one began, in
            nanoseconds since the epoch, its durations, and their averages until then. On CUDA these are times of
            launching, not of computing.
    """

    def __init__(self, exchange_name: str) -> None:
        self.meter: Telemetry | None = None
        self.sample_rate = 100
        self.is_sampling = False
        self.published: dict[str, int] = {}
        self._exchange_name = exchange_name
        self._forward_ns = 0
        self._marks: dict[str, int] = {}
        self._totals: Counter[str] = Counter()
        self._landing_s = 0.0
        self._step = 0
        self._own: Span | None = None  # on the timeline, what this process does now
        self._exchanges: dict[int, Span] = {}

    def begin_step(self, iteration: int) -> None:
        """A training forward begins."""
        if recorder.is_on:
            recorder.begin_step(iteration)
        if self.is_sampling and self._marks.keys() >= set(_MARKS.values()):
            self.is_sampling = False
            self._publish()
        self._forward_ns = time.time_ns()

    def begin(self, iteration: int) -> Observe | None:
        """A forward has ended, and its backward is expected: return the function to call as
        ``observe(moment, bucket, position)``, None: nobody listens.
        """
        listeners: list[Observe] = []
        self.is_sampling = iteration <= ALWAYS_SAMPLED_ITERATIONS or iteration % self.sample_rate == 0
        if self.is_sampling:
            self._marks = {"iteration": iteration, "forward_compute_time_start": self._forward_ns}
            listeners.append(self._time)
        if recorder.is_on:
            self._step, self._own, self._exchanges = iteration, None, {}
            listeners.append(self._draw)
        if self.meter is not None:
            listeners.append(self._count)
        if not listeners:
            return None

        def tell(moment: str, bucket: Bucket | None = None, position: int | None = None) -> None:
            for listener in listeners:
                listener(moment, bucket, position)

        return tell

    def _publish(self) -> None:
        durations = {name: self._marks[last] - self._marks[first] for name, (first, last) in _DURATIONS.items()}
        durations[_OVERLAP] = max(0, durations[_OVERLAP])
        if min(durations.values()) >= 0:  # else the clock was set back
            self._totals.update({**durations, "samples": 1})
            averages = {f"avg_{name}": self._totals[name] // self._totals["samples"] for name in durations}
            self.published = {**averages, **durations, **self._marks}

    def _time(self, moment: str, *_: object) -> None:
        if moment in _MARKS:
            self._marks.setdefault(_MARKS[moment], time.time_ns())  # of several alike the first counts

    def _count(self, moment: str, bucket: Bucket | None, _position: int | None) -> None:
        assert self.meter is not None
        if moment == "exchange" and bucket is not None:
            self.meter.exchanged_bytes += bucket.size_bytes
        elif moment == "landing":
            self._landing_s = time.monotonic()
        elif moment == "landed":
            self.meter.step_ended(time.monotonic() - self._landing_s)

    def _draw(self, moment: str, bucket: Bucket | None, position: int | None) -> None:
        if self._own is not None:
            self._own.close()
            self._own = None
        if bucket is None:
            return
        if moment in ("unpack", "written"):
            # Where nothing came back the exchange goes on elsewhere, and has spans of its own.
            exchange = self._exchanges.pop(bucket.index, None)
            if exchange is not None and moment == "unpack":
                exchange.close()
        facts = bucket.facts
        if position is not None:
            facts = {**facts, "bytes": bucket.parameters[position].nbytes, "parameters": [bucket.names[position]]}
        if moment == "exchange":
            self._exchanges[bucket.index] = span(self._exchange_name, facts, step=self._step, track=EXCHANGE)
        elif moment in ("pack", "wait", "unpack"):
            self._own = span(moment, facts, step=self._step)
