"""What a forward, a backward, a bucket's exchange and a push leave on the timeline; called while one is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel.distributed import _find_tensors

from psengine.tensors.bucket import Bucket
from psengine.tracing.files import EXCHANGE
from psengine.tracing.observers import Observer
from psengine.tracing.timeline import now_ns, recorder

# Users' structures may raise when they are searched for tensors.
_cannot_look_at_inputs = Observer("on the timeline, the number of samples of a forward")
_cannot_look_at_outputs = Observer("on the timeline, the backward of a forward")


def record_forward(started_ns: int, step: int, inputs: Any, output: Any) -> None:
    """Record a forward that began at ``started_ns``, and watch ``output`` for the backward of ``step``."""
    if not recorder.is_on or torch.compiler.is_compiling():
        return
    samples = None
    with _cannot_look_at_inputs:
        samples = next((tensor.shape[0] for tensor in _find_tensors(inputs) if tensor.dim() > 0), None)
    is_training = torch.is_grad_enabled()
    recorder.add(
        "forward" if is_training else "forward without gradients", started_ns, step=step, args={"samples": samples}
    )
    if is_training:
        with _cannot_look_at_outputs:
            watch = _BackwardWatch(step)
            for tensor in _find_tensors(output):
                # A leaf (an output that is a parameter) would keep the hook for good.
                if tensor.grad_fn is not None:
                    tensor.register_hook(watch)


class _BackwardWatch:
    """Hook on the gradients of a forward's outputs: the first one begins the span of the backward."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._started_ns = 0

    @_cannot_look_at_outputs
    def __call__(self, _gradient: Any) -> None:
        if self._started_ns == 0 and recorder.is_on and not torch.compiler.is_compiling():
            self._started_ns = now_ns()
            # Callbacks run in order, so this one comes before the reducer's, which waits for the other ranks.
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        recorder.add("backward", self._started_ns, step=self._step)
        self._started_ns = 0


class ExchangeSpans:
    """Spans of a reducer's buckets: packed, exchanged (a span called ``name``), waited for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._handed_over_ns: dict[int, int] = {}

    def packed(self, bucket: Bucket, started_ns: int, step: int) -> None:
        """``bucket``, whose packing began at ``started_ns``, is handed over now."""
        ended_ns = now_ns()
        recorder.add("pack", started_ns, ended_ns=ended_ns, step=step, args=bucket.facts)
        self._handed_over_ns[bucket.index] = ended_ns

    def wait(self, wait: Callable[[], torch.Tensor | None], bucket: Bucket, step: int) -> torch.Tensor | None:
        """Return ``wait()``; record the wait and the exchange unless it returned None (gradients stay local)."""
        started_ns = recorder.settled_ns()
        recorder.notes_waits = False
        try:
            result = wait()
        finally:
            recorder.notes_waits = True
        if result is None:
            return None
        ended_ns = recorder.settled_ns()
        recorder.add("wait", started_ns, ended_ns=ended_ns, step=step, args=bucket.facts)
        handed_over_ns = self._handed_over_ns.pop(bucket.index, None)
        if handed_over_ns is not None:
            recorder.add(self._name, handed_over_ns, ended_ns=ended_ns, step=step, args=bucket.facts, track=EXCHANGE)
        return result


class PushSpans:
    """Pushes of a strategy whose answers are weights."""

    def __init__(self) -> None:
        self._left: dict[int, tuple[int, int]] = {}

    def leaves(self, bucket: Bucket) -> None:
        """The gradients of ``bucket`` are sent now."""
        self._left[bucket.index] = recorder.step, now_ns()

    def answered(self, bucket: Bucket, started_ns: int) -> int:
        """The wait for the answers to ``bucket``, which began at ``started_ns``, is over; return the time."""
        ended_ns = now_ns()
        recorder.add("wait", started_ns, ended_ns=ended_ns, args=bucket.facts)
        step, left_ns = self._left.pop(bucket.index, (0, 0))
        if left_ns:
            recorder.add("push", left_ns, ended_ns=ended_ns, step=step, args=bucket.facts, track=EXCHANGE)
        return ended_ns
