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
from collections.abc import Callable

from psengine.tensors.bucket import Bucket
from psengine.tracing.backward_timer import BackwardTimer
from psengine.tracing.telemetry import Telemetry
from psengine.tracing.timeline import EXCHANGE, Span, recorder, span

Observe = Callable[..., None]


class Backwards:
    """Who watches one model.

    Args:
        exchange_name: what a timeline calls the exchange of a bucket.

    Attributes:
        timer: samples times for the logging data.
        meter: counts steps for Prometheus; None where nobody does.
    """

    def __init__(self, exchange_name: str) -> None:
        self.timer = BackwardTimer()
        self.meter: Telemetry | None = None
        self._exchange_name = exchange_name
        self._landing_s = 0.0

    def begin_step(self, iteration: int) -> None:
        """A training forward begins."""
        if recorder.is_on:
            recorder.begin_step(iteration)
        self.timer.start(iteration)

    def begin(self, iteration: int) -> Observe | None:
        """A backward is expected: return the function to call as ``observe(moment, bucket, position)``, None: nobody
        listens.
        """
        listeners: list[Observe] = []
        if self.timer.begin_backward():
            listeners.append(self.timer.mark)
        if recorder.is_on:
            listeners.append(_Spans(iteration, self._exchange_name).mark)
        if self.meter is not None:
            listeners.append(self._count)
        if not listeners:
            return None

        def tell(moment: str, bucket: Bucket | None = None, position: int | None = None) -> None:
            for listener in listeners:
                listener(moment, bucket, position)

        return tell

    def _count(self, moment: str, bucket: Bucket | None, _position: int | None) -> None:
        assert self.meter is not None
        if moment == "exchange" and bucket is not None:
            self.meter.exchanged_bytes += bucket.size_bytes
        elif moment == "landing":
            self._landing_s = time.monotonic()
        elif moment == "landed":
            self.meter.step_ended(time.monotonic() - self._landing_s)


class _Spans:
    """One backward on the timeline."""

    def __init__(self, step: int, exchange_name: str) -> None:
        self._step = step
        self._exchange_name = exchange_name
        self._own: Span | None = None  # what this process does now
        self._exchanges: dict[int, Span] = {}

    def mark(self, moment: str, bucket: Bucket | None, position: int | None) -> None:
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
