"""The pushes of one step to servers that step, and the weights that come back."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from psengine.parameter_server.client.operation import Push, wait_all
from psengine.parameter_server.client.worker_session import WorkerSession
from psengine.protocol.layout import ChunkSpec
from psengine.strategies.servers.chunked_replica import ChunkedReplica
from psengine.tensors.bucket import Bucket
from psengine.tracing.timeline import EXCHANGE, Span, span

logger = logging.getLogger(__name__)

# Weights are loaded when so much of them is here, while more travel. Less wakes this thread more often.
LOADED_BYTES = 4 * 1024 * 1024
REFUSALS = {"non_finite": "it holds NaN or infinity", "stale": "computed before this worker was away"}


class Pushes:
    """The pushes of the step under way.

    Args:
        session: the worker's.
        chunks: of its replica.
        trained: the chunks that hold a trained parameter; others are never pushed.

    Attributes:
        refused: how many chunks the servers refused.
    """

    def __init__(self, session: WorkerSession, chunks: ChunkedReplica, trained: Collection[ChunkSpec]) -> None:
        self._trained = {spec.key for spec in trained}
        self.refused = 0
        self._session = session
        self._chunks = chunks
        self._pushes: list[tuple[Bucket, Span, list[tuple[ChunkSpec, Push]]]] = []
        self._buffer_pushes: list[Push] = []
        # Of buckets on another device: the values, where servers of this host read them.
        self._payloads: dict[int, torch.Tensor] = {}

    def push(
        self,
        bucket: Bucket,
        *,
        missing: Collection[str] = (),
        groups: Sequence[Mapping[str, Any]] | None = None,
        weight: float | None = None,
    ) -> None:
        """Send a packed bucket, whose memory must not change until the servers have answered.

        Args:
            bucket: of gradients or differences.
            missing: names of its parameters that have none.
            groups: the optimizer's hyperparameters now.
            weight: what they count in a merge; 0 only asks for the weights.
        """
        travelling = span("push", bucket.facts, track=EXCHANGE)
        payload = bucket.flat
        if bucket.device.type != "cpu":
            if bucket.index not in self._payloads:
                self._payloads[bucket.index] = self._session.segments.allocate(bucket.numel, bucket.dtype)
            payload = self._payloads[bucket.index].copy_(payload)
        pushes: list[tuple[ChunkSpec, Push]] = []
        self._pushes.append((bucket, travelling, pushes))
        for spec, start, end in self._chunks.of_bucket[bucket.index]:
            if spec.key not in self._trained:
                continue
            absent = [index for index, segment in enumerate(spec.segments) if segment.name in missing]
            values: torch.Tensor | None = payload[start:end]
            if weight == 0 or len(absent) == len(spec.segments):
                # This worker only asks for the weights; others must not wait for what it computed.
                absent, values = [], None
            # Weights are read where they come.
            push = self._session.push(spec.key, values, (), groups, absent, weight, reads_in_place=True)
            pushes.append((spec, push))

    def push_buffers(self) -> None:
        """Send the buffers' values, which ends the step. Nothing comes back: workers keep their running statistics."""
        self._chunks.follow_buffers()
        for key in self._chunks.buffers:
            self._buffer_pushes.append(self._session.push(key, self._chunks.values(self._chunks.specs[key]), ()))
        self._session.end_step()

    def wait(self) -> None:
        """Wait for all answers. Weights are loaded while others travel."""
        buckets, self._pushes = self._pushes, []
        buffer_pushes, self._buffer_pushes = self._buffer_pushes, []
        self._chunks.follow_parameters()
        try:
            for bucket, travelling, pushes in buckets:
                copied: set[str] = set()
                last: Sequence[tuple[ChunkSpec, Push]] = ()
                with span("wait", bucket.facts):
                    for group in _groups(pushes):
                        copied |= self._load(last)
                        last = group
                        with self._session.telemetry.blocked():
                            wait_all([push for _, push in group])
                travelling.close()
                with span("apply", bucket.facts):
                    self._chunks.write_images(copied | self._load(last))
            with self._session.telemetry.blocked():
                wait_all(buffer_pushes)
        except BaseException:
            self._session.release_payloads()
            raise
        self._session.telemetry.step_ended()
        for _, _, pushes in buckets:
            for spec, push in pushes:
                refused = push.wait().body.get("refused")
                if refused and refused != "abstained":
                    self._report_refusal(spec, refused)

    def _load(self, pushes: Sequence[tuple[ChunkSpec, Push]]) -> set[str]:
        values = [values for _, push in pushes if (values := push.take()) is not None]
        return self._chunks.load([spec for spec, _ in pushes], values)

    def _report_refusal(self, spec: ChunkSpec, reason: str) -> None:
        self.refused += 1
        # At powers of two: often enough to be seen, rarely enough to be read.
        if self.refused & (self.refused - 1) == 0:
            logger.warning(
                "the servers refused the gradient of %s (%s), and this worker goes on from their weights; %d so far",
                *(spec.describe(), REFUSALS.get(reason, reason), self.refused),
            )


def _groups(pushes: Sequence[tuple[ChunkSpec, Push]]) -> Iterator[Sequence[tuple[ChunkSpec, Push]]]:
    """Neighbouring chunks of about ``LOADED_BYTES`` together."""
    first, size_bytes = 0, 0
    for index, (spec, _) in enumerate(pushes, 1):
        size_bytes += spec.size_bytes
        if size_bytes >= LOADED_BYTES or index == len(pushes):
            yield pushes[first:index]
            first, size_bytes = index, 0
