"""Single passes between a flat tensor and many: the right bits first, then the time of each way to do it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from harness.record import Record
from harness.turns import Turn, take_turns, wall_clock
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


def check_bits(record: Record) -> None:
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
    record.caveat(f"Correct: 4 operators on {len(KINDS) ** 2} pairs of kinds have the CPU reference's bits.")


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


def numels_of(size_mb: int, count: int, aligned: bool) -> list[int]:
    """Like a network's: most tensors small, a few large. Aligned: multiples of 16 bytes."""
    total = size_mb * MB // 4
    weights = [1000.0 if index % 5 == 0 else 1.0 + index % 7 for index in range(count)]
    numels = [int(total * weight / sum(weights)) // 4 * 4 + (0 if aligned else 1) for weight in weights]
    numels[0] += (total - sum(numels)) // 4 * 4
    return numels


def device_clock(sleep_cycles: int) -> Callable[[Callable[[], object]], tuple[float, float]]:
    """A clock that shows seconds on the device, which sleeps until all is queued, and on the host."""

    def clock(run: Callable[[], object]) -> tuple[float, float]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if sleep_cycles:
            torch.cuda._sleep(sleep_cycles)
        start.record()
        host_s = wall_clock(run)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3, host_s

    return clock


def add_both(record: Record, labels: Mapping[str, Any], shown: Mapping[str, list[tuple[float, float]]]) -> None:
    """A case of the device's seconds, and one of the host's."""
    for place, clock in enumerate(("device", "host")):
        record.add({**labels, "clock": clock}, {name: [both[place] for both in own] for name, own in shown.items()})


def cycles_per_us() -> float:
    torch.cuda._sleep(1000)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(10_000_000)
    end.record()
    torch.cuda.synchronize()
    return 10_000_000 / (1e3 * start.elapsed_time(end))


def measure_case(
    direction: str, size_mb: int, count: int, aligned: bool, rounds: int, cycles: float
) -> dict[str, list[tuple[float, float]]]:
    numels = numels_of(size_mb, count, aligned)
    # 50 MB of cache on an H100, 126 MB on a B200: whoever comes back to its buffers must not find them there.
    sets = [Buffers.make(numels) for _ in range(max(2, 600 // (3 * size_mb)))]
    awake, next_set = device_clock(0), itertools.cycle(sets)
    for _ in range(WARM_UP_ROUNDS):
        host_s = max(
            awake(lambda candidate=candidate, buffers=buffers: candidate(buffers))[1]
            for buffers in sets
            for candidate in CANDIDATES[direction].values()
        )
    turns = {
        name: Turn(lambda candidate=candidate: candidate(next(next_set)))
        for name, candidate in CANDIDATES[direction].items()
    }
    return take_turns(turns, rounds, warm_up=0, clock=device_clock(int(cycles * (2e6 * host_s + 200))))


def measure(rounds: int, record: Record) -> None:
    """Time every candidate on every size."""
    cycles = cycles_per_us()
    cases = [(size, count, True) for size in SIZES_MB for count in TENSOR_COUNTS]
    cases += [(size, 50, False) for size in SIZES_MB]
    for direction in CANDIDATES:
        for size_mb, count, aligned in cases:
            tensors = f"{count}" if aligned else f"{count}, odd sizes"
            labels = {"pass": direction, "MB": size_mb, "tensors": tensors}
            add_both(record, labels, measure_case(direction, size_mb, count, aligned, rounds, cycles))
            torch.cuda.empty_cache()
