"""Single passes between a flat tensor and many: the right bits first, then the time of each way to do it."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from psengine.kernels import ops

MB = 10**6
SCALE = 1 / 3  # rounds, unlike a power of two
SIZES_MB = (25, 100)
TENSOR_COUNTS = (1, 50, 400)
KINDS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
WARM_UP_ROUNDS = 3


# ---- bits ----------------------------------------------------------------------------------------------------------


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    bits = BITS[expected.element_size()]
    return torch.equal(actual.cpu().view(bits), expected.view(bits))


def check_bits() -> tuple[str, list[dict[str, Any]]]:
    """Run every operator on every pair of kinds; raise at the first bit that is not the CPU reference's."""
    generator = torch.Generator().manual_seed(0)
    sizes = [1, 7, 4096, 0, 4099, 100_003, *range(1, 300)]
    numel = sum(sizes)
    for kind, flat_kind in itertools.product(KINDS, KINDS):
        made = [torch.randn(size, dtype=torch.float64, generator=generator).to(kind) for size in sizes]
        flat = torch.zeros(numel, dtype=flat_kind)
        tensors = [tensor.cuda() for tensor in made]
        on_device = flat.cuda()
        checks: dict[str, bool] = {}
        ops.pack_reference_(flat, made, SCALE)
        ops.pack_(on_device, tensors, SCALE)
        checks["pack_"] = same_bits(on_device, flat)
        counts, square_sums = ops.pack_stats_(on_device.zero_(), tensors, SCALE)
        wanted_counts, wanted_sums = ops.pack_stats_reference_(flat, made, SCALE)
        checks["pack_stats_"] = (
            same_bits(on_device, flat)
            and torch.equal(counts.cpu(), wanted_counts)
            and torch.allclose(square_sums.cpu(), wanted_sums, rtol=1e-12, atol=0)
        )
        ops.unpack_reference_(made, flat, SCALE)
        ops.unpack_(tensors, on_device, SCALE)
        checks["unpack_"] = all(same_bits(a, b) for a, b in zip(tensors, made, strict=True))
        addend = torch.randn(numel, dtype=torch.float64, generator=generator).to(kind)
        ops.accumulate_reference_(flat, addend, SCALE)
        ops.accumulate_(on_device, addend.cuda(), SCALE)
        checks["accumulate_"] = same_bits(on_device, flat)
        wrong = [name for name, is_right in checks.items() if not is_right]
        if wrong:
            raise AssertionError(f"{', '.join(wrong)}: other bits than on the CPU ({kind} in {flat_kind})")
    text = f"Correct: 4 operators on {len(KINDS) ** 2} pairs of kinds have the CPU reference's bits."
    return text, [{"pairs": len(KINDS) ** 2, "tensors": len(sizes)}]


# ---- time ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Buffers:
    """One copy of everything that a candidate may touch; several copies take turns, so that no cache holds them."""

    flat: Tensor
    views: list[Tensor]
    gradients: list[Tensor]
    other_flat: Tensor

    @classmethod
    def make(cls, numels: list[int]) -> Buffers:
        flat = torch.empty(sum(numels), device="cuda")
        gradients = [torch.randn(numel, device="cuda") for numel in numels]
        return cls(flat, list(flat.split(numels)), gradients, torch.randn_like(flat))


def device_copy(b: Buffers) -> None:
    b.flat.copy_(b.other_flat)


def pack_each(b: Buffers) -> None:
    # What native DDP does in C++ for each parameter, at::mul_out; Python makes its host time longer.
    for view, gradient in zip(b.views, b.gradients, strict=True):
        torch.mul(gradient, SCALE, out=view)


def pack_foreach(b: Buffers) -> None:
    torch._foreach_copy_(b.views, b.gradients)
    b.flat.mul_(SCALE)


def pack_cat(b: Buffers) -> None:
    torch.cat(b.gradients, out=b.flat)
    b.flat.mul_(SCALE)


def unpack_foreach(b: Buffers) -> None:
    torch._foreach_copy_(b.gradients, b.views)


def unpack_each(b: Buffers) -> None:
    for gradient, view in zip(b.gradients, b.views, strict=True):
        gradient.copy_(view)


Candidate = Callable[[Buffers], Any]
COPY = "device copy"
CANDIDATES: dict[str, dict[str, Candidate]] = {
    "pack": {
        COPY: device_copy,
        "psengine": lambda b: ops.pack_(b.flat, b.gradients, SCALE),
        "psengine, statistics": lambda b: ops.pack_stats_(b.flat, b.gradients, SCALE),
        "mul(out=) for each": pack_each,
        "_foreach_copy_, mul_": pack_foreach,
        "cat(out=), mul_": pack_cat,
    },
    "unpack": {
        COPY: device_copy,
        "psengine": lambda b: ops.unpack_(b.gradients, b.flat, 1.0),
        "copy_ for each": unpack_each,
        "_foreach_copy_": unpack_foreach,
    },
}


@dataclass(frozen=True)
class Row:
    """Medians; bytes are those read and written, once each, of a pass that does nothing twice."""

    direction: str
    candidate: str
    size_mb: int
    tensors: int
    aligned: bool
    device_us: float
    host_us: float
    gb_per_s: float
    of_copy: float  # copy's time over this one's, within a repetition


def numels_of(size_mb: int, count: int, aligned: bool) -> list[int]:
    """Like a network's: most tensors small, a few large. Aligned: multiples of 16 bytes."""
    total = size_mb * MB // 4
    weights = [1000.0 if index % 5 == 0 else 1.0 + index % 7 for index in range(count)]
    numels = [int(total * weight / sum(weights)) // 4 * 4 + (0 if aligned else 1) for weight in weights]
    numels[0] += (total - sum(numels)) // 4 * 4
    return numels


def time_once(candidate: Candidate, buffers: Buffers, sleep_cycles: int) -> tuple[float, float]:
    """Return microseconds on the device, which slept until all was queued, and on the host."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(sleep_cycles)
    start.record()
    begin = time.perf_counter()
    candidate(buffers)
    host_us = 1e6 * (time.perf_counter() - begin)
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end), host_us


def cycles_per_us() -> float:
    torch.cuda._sleep(1000)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(10_000_000)
    end.record()
    torch.cuda.synchronize()
    return 10_000_000 / (1e3 * start.elapsed_time(end))


def measure_case(direction: str, size_mb: int, count: int, aligned: bool, repetitions: int, cycles: float) -> list[Row]:
    numels = numels_of(size_mb, count, aligned)
    # 50 MB of cache on an H100, 126 MB on a B200: whoever comes back to its buffers must not find them there.
    sets = [Buffers.make(numels) for _ in range(max(2, 600 // (3 * size_mb)))]
    candidates = CANDIDATES[direction]
    for _ in range(WARM_UP_ROUNDS):
        host_us = max(time_once(candidate, buffers, 0)[1] for buffers in sets for candidate in candidates.values())
    sleep_cycles = int(cycles * (2 * host_us + 200))
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    names = list(candidates)
    for repetition in range(repetitions):
        # Rotate who begins: nobody always runs after the same neighbour.
        turn = repetition % len(names)
        for index, name in enumerate(names[turn:] + names[:turn]):
            seconds[name].append(time_once(candidates[name], sets[(repetition + index) % len(sets)], sleep_cycles))
    moved_bytes = 2 * 4 * sum(numels)
    rows = []
    for name, own in seconds.items():
        device_us = statistics.median(device for device, _ in own)
        of_copy = statistics.median(copy / device for (copy, _), (device, _) in zip(seconds[COPY], own, strict=True))
        host_us = statistics.median(host for _, host in own)
        gb_per_s = moved_bytes / device_us / 1e3
        rows.append(Row(direction, name, size_mb, count, aligned, device_us, host_us, gb_per_s, of_copy))
    return rows


def table_of(rows: list[Row]) -> str:
    lines = [
        "| pass | MB | tensors | candidate | device, µs | host, µs | GB/s | of a device copy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        tensors = f"{row.tensors}" if row.aligned else f"{row.tensors}, odd sizes"
        lines.append(
            f"| {row.direction} | {row.size_mb} | {tensors} | {row.candidate} | {row.device_us:.1f} |"
            f" {row.host_us:.1f} | {row.gb_per_s:.0f} | {row.of_copy:.2f} |"
        )
    return "\n".join(lines)


def measure(repetitions: int) -> tuple[str, list[dict[str, Any]]]:
    """Time every candidate on every size, and say whether the target is met."""
    cycles = cycles_per_us()
    rows: list[Row] = []
    cases = [(size, count, True) for size in SIZES_MB for count in TENSOR_COUNTS]
    cases += [(size, 50, False) for size in SIZES_MB]
    for direction in CANDIDATES:
        for size_mb, count, aligned in cases:
            rows += measure_case(direction, size_mb, count, aligned, repetitions, cycles)
            torch.cuda.empty_cache()
    target = [r for r in rows if r.candidate == "psengine" and r.size_mb == 100 and r.aligned and r.direction == "pack"]
    met = all(row.of_copy >= 0.85 for row in target)
    verdict = ", ".join(f"{row.of_copy:.2f} with {row.tensors} tensors" for row in target)
    text = f"**Passes, float32**; {repetitions} repetitions\n\n{table_of(rows)}\n\n"
    text += f"Target, 0.85 of a device copy of 100 MB: {'met' if met else 'NOT met'} ({verdict})."
    return text, [asdict(row) for row in rows]
