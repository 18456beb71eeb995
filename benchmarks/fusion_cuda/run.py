"""How fast gradients are packed on a GPU, against torch's own ways.

python benchmarks/fusion_cuda/run.py [--quick] [--json FILE]
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.command_line import parser_of
from harness.record import Record
from harness.turns import Turn, take_turns, wall_clock

from psengine.kernels import ops

QUESTION = "How fast are gradients packed on a GPU?"
WARM_UP_ROUNDS = 5
SCALE = 1 / 3  # rounds, unlike a power of two
SIZES_MB = (25, 100)
TENSOR_COUNTS = (1, 50, 400)
COPY = "device copy"


def why_not() -> str | None:
    """What keeps this benchmark from running here."""
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} sees no CUDA device here, so there is nothing to measure."
            " Run this on a machine with an NVIDIA GPU and a CUDA build of torch."
        )
    if not ops.native_available():
        return "psengine's native extension is not built (with a C++ compiler: pip install -e .)"
    if not torch._C._dispatch_has_kernel_for_dispatch_key("psengine::pack_", "CUDA"):
        return "psengine's native extension has no CUDA kernels (with nvcc on PATH: PSENGINE_CUDA=1 pip install -e .)"
    return None


def device_clock(sleep_cycles: int) -> Callable[[Callable[[], object]], float]:
    """A clock that shows seconds on the device, which sleeps until all is queued: the host's time does not count."""

    def clock(run: Callable[[], object]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if sleep_cycles:
            torch.cuda._sleep(sleep_cycles)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    return clock


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


def pack_each(b: Buffers) -> None:
    # What native DDP does in C++ for each parameter, at::mul_out; Python makes its host time longer.
    for view, gradient in zip(b.views, b.gradients, strict=True):
        torch.mul(gradient, SCALE, out=view)


def pack_foreach(b: Buffers) -> None:
    torch._foreach_copy_(b.views, b.gradients)
    b.flat.mul_(SCALE)


PASSES: dict[str, Callable[[Buffers], Any]] = {
    COPY: lambda b: b.flat.copy_(b.other_flat),
    "psengine": lambda b: ops.pack_(b.flat, b.gradients, SCALE),
    "mul(out=) for each": pack_each,
    "_foreach_copy_, mul_": pack_foreach,
    "psengine, unpack": lambda b: ops.unpack_(b.gradients, b.flat, 1.0),
    "_foreach_copy_, unpack": lambda b: torch._foreach_copy_(b.gradients, b.views),
}


def numels_of(size_mb: int, count: int) -> list[int]:
    """Like a network's: most tensors small, a few large; multiples of 16 bytes."""
    total = size_mb * 10**6 // 4
    weights = [1000.0 if index % 5 == 0 else 1.0 + index % 7 for index in range(count)]
    numels = [int(total * weight / sum(weights)) // 4 * 4 for weight in weights]
    numels[0] += (total - sum(numels)) // 4 * 4
    return numels


def measure_passes(rounds: int, record: Record) -> None:
    cycles = 10_000_000
    speed = cycles / device_clock(0)(lambda: torch.cuda._sleep(cycles))
    for size_mb, count in itertools.product(SIZES_MB, TENSOR_COUNTS):
        numels = numels_of(size_mb, count)
        # 50 MB of cache on an H100, 126 MB on a B200: whoever comes back to its buffers must not find them there.
        sets = [Buffers.make(numels) for _ in range(max(2, 600 // (3 * size_mb)))]
        next_set = itertools.cycle(sets)
        calls = {name: lambda call=call, buffers=next_set: call(next(buffers)) for name, call in PASSES.items()}
        host_s = max(wall_clock(call) for _ in range(WARM_UP_ROUNDS) for call in calls.values())
        clock = device_clock(int(speed * (2 * host_s + 2e-4)))
        turns = {name: Turn(call) for name, call in calls.items()}
        labels = {"MB": size_mb, "tensors": count}
        record.add(labels, take_turns(turns, rounds, warm_up=0, clock=clock))
        torch.cuda.empty_cache()


def main() -> None:
    parser = parser_of(__doc__, rounds=100, quick="10 rounds")
    options = parser.parse_args()
    rounds = min(10, options.rounds) if options.quick else options.rounds
    record = Record.begin("fusion_cuda", QUESTION, options, peers=(COPY,))
    if reason := why_not():
        record.caveat(f"Not measured: {reason}")
    else:
        properties = torch.cuda.get_device_properties(0)
        record.caveat(f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}")
        measure_passes(rounds, record)
    record.finish()


if __name__ == "__main__":
    main()
