"""``compress=auto``: which codec, from the first steps of a training.

    steps 0 to 2   nothing is measured: buckets are rebuilt, memory is touched
    steps 3 to 5   time of a step, and of it the time that backward waits for averages
    step 6         latency and rate of the link, and each codec's encoding; all ranks take the slowest rank's figures

A step with a codec is expected to take as long as without, less what its bytes save of the waiting, plus encoding.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from psengine.codecs.auto import Auto
from psengine.codecs.base import Codec
from psengine.codecs.identity import IDENTITY
from psengine.codecs.registry import resolve_codec
from psengine.collectives.base import Collective
from psengine.strategies.exchange import Reduction
from psengine.tensors.bucket import Bucket

logger = logging.getLogger(__name__)

# Those that keep the accuracy of most trainings; sparser ones are for the user to choose.
CANDIDATES = ("bf16", "int8", "fp4")
MIN_SAVING = 0.03  # of a step: less is within the measurement's noise, and a codec rounds gradients
FIRST_MEASURED_STEP, CHOOSING_STEP = 3, 6
SMALL_NUMEL, LARGE_NUMEL = 1024, 256 * 1024
PROBES = 3


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The slowest rank's figures.

    Attributes:
        step_s: of a step, without a codec.
        wait_s: of it, waiting for averages.
        latency_s: of an all-reduce of nothing.
        rate: bytes of values that an all-reduce sums in a second.
        operations: all-reduces in a step.
        bytes_by_codec: payload bytes in a step, by the name of the codec; "none" are the values.
        encode_s: encoding and decoding in a step, likewise.
    """

    step_s: float
    wait_s: float
    latency_s: float
    rate: float
    operations: int
    bytes_by_codec: Mapping[str, int]
    encode_s: Mapping[str, float]

    def exchange_s(self, name: str) -> float:
        """Time on the link."""
        # An all-to-all and an all-gather are two operations with an all-reduce's bytes.
        operations = self.operations if name in ("none", "bf16") else 2 * self.operations
        return operations * self.latency_s + self.bytes_by_codec[name] / self.rate

    def expected_s(self, name: str) -> float:
        """Time of a step."""
        saved_s = self.exchange_s("none") - self.exchange_s(name)
        return self.step_s - min(self.wait_s, saved_s) + self.encode_s[name]


def fastest(measured: Measured) -> str:
    """The codec with the shortest step; ``none`` where it would save less than MIN_SAVING of the step."""
    best = min(measured.bytes_by_codec, key=measured.expected_s)
    saves = measured.expected_s("none") - measured.expected_s(best)
    return best if saves >= MIN_SAVING * measured.expected_s("none") else "none"


class CodecChoice:
    """Measures and chooses, once."""

    def __init__(self, codec: Auto) -> None:
        self._codec = codec
        self._steps = 0
        self._began_s = 0.0
        self._wait_s = 0.0

    def begin(self, collective: Collective, buckets: Sequence[Bucket]) -> Codec | None:
        """A step begins, on all ranks; the codec of all steps from this one on, once it is chosen."""
        step, self._steps = self._steps, self._steps + 1
        if step == FIRST_MEASURED_STEP:
            self._began_s, self._wait_s = time.perf_counter(), 0.0
        if step != CHOOSING_STEP:
            return None
        measured = self._measure(collective, [bucket for bucket in buckets if not bucket.sparse])
        name = fastest(measured)
        chosen = name if self._codec.may_be_lossy else "none"
        logger.info(
            "compress=auto: a step takes %.1f ms and waits %.1f ms for averages; the link sums %.0f MB/s, latency %.2f"
            " ms. Expected: %s. Chosen: %s%s",
            1e3 * measured.step_s,
            1e3 * measured.wait_s,
            measured.rate / 1e6,
            1e3 * measured.latency_s,
            ", ".join(
                f"{one} {1e3 * measured.expected_s(one):.1f} ms ({measured.bytes_by_codec[one] / 1e6:.2f} MB, encoding"
                f" {1e3 * measured.encode_s[one]:.1f} ms)"
                for one in measured.bytes_by_codec
            ),
            chosen,
            "" if chosen == name else f", because {name} is lossy: lossy=true permits it",
        )
        return resolve_codec(chosen)

    def timed(self, reduction: Reduction) -> Reduction:
        """``reduction``, whose waits are measured."""
        return _Timed(reduction, self)

    def note_wait(self, seconds: float) -> None:
        """Backward waited."""
        self._wait_s += seconds

    def _measure(self, collective: Collective, buckets: Sequence[Bucket]) -> Measured:
        steps = CHOOSING_STEP - FIRST_MEASURED_STEP
        step_s = (time.perf_counter() - self._began_s) / steps
        codecs = [IDENTITY, *map(resolve_codec, CANDIDATES)]
        encode_s = [sum(_coding_s(codec, bucket) for bucket in buckets) for codec in codecs]
        probes = [_probe_s(collective, numel) for numel in (SMALL_NUMEL, LARGE_NUMEL)]
        own = torch.tensor([step_s, self._wait_s / steps, *probes, *encode_s], dtype=torch.float64)
        rows = own.new_empty((collective.world_size, own.numel()))
        collective.all_gather(rows, own, what="times of the codec's choice").wait()
        step_s, wait_s, small_s, large_s, *encode_s = rows.amax(dim=0).tolist()
        moved = 4 * (LARGE_NUMEL - SMALL_NUMEL)
        return Measured(
            step_s=step_s,
            wait_s=wait_s,
            latency_s=small_s,
            rate=moved / max(1e-9, large_s - small_s),
            operations=len(buckets),
            bytes_by_codec={codec.name: sum(_payload_bytes(codec, bucket) for bucket in buckets) for codec in codecs},
            encode_s={codec.name: seconds for codec, seconds in zip(codecs, encode_s, strict=True)},
        )


def _payload_bytes(codec: Codec, bucket: Bucket) -> int:
    if not codec.covers(bucket.dtype):
        return bucket.size_bytes
    return codec.payload_spec(bucket.numel, bucket.dtype).size_bytes


def _coding_s(codec: Codec, bucket: Bucket) -> float:
    """Encoding with a residual and two decodings; a cast happens while packing."""
    if codec.summed_dtype(bucket.dtype) is not None or not codec.covers(bucket.dtype):
        return 0.0
    values = torch.ones(bucket.numel, dtype=bucket.dtype, device=bucket.device)
    state = codec.make_state(bucket.numel, bucket.dtype, bucket.device)
    spec = codec.payload_spec(bucket.numel, bucket.dtype)
    payload = torch.empty(spec.numel, dtype=spec.dtype, device=bucket.device)
    best_s = float("inf")
    for _ in range(2):
        began_s = time.perf_counter()
        codec.encode(values, payload, state)
        codec.decode(payload, values)
        codec.decode_add(payload, values)
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s


def _probe_s(collective: Collective, numel: int) -> float:
    """Of an all-reduce of so many float32."""
    flat, best_s = torch.zeros(numel), float("inf")
    for _ in range(PROBES):
        began_s = time.perf_counter()
        collective.all_reduce(flat, what="probe of the link").wait()
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s


class _Timed(Reduction):
    """Notes how long the wait takes."""

    def __init__(self, reduction: Reduction, choice: CodecChoice) -> None:
        self._reduction = reduction
        self._choice = choice

    @override
    def wait(self) -> torch.Tensor | None:
        began_s = time.perf_counter()
        try:
            return self._reduction.wait()
        finally:
            self._choice.note_wait(time.perf_counter() - began_s)

    @override
    def drop(self) -> None:
        self._reduction.drop()

    @override
    def spare(self, unused: Sequence[bool]) -> None:
        self._reduction.spare(unused)
