"""How fast gradients are packed on a GPU, and what that does to a training step, against torch's own ways.

python benchmarks/fusion_cuda/run.py [--quick] [--parts correctness,passes,steps,bits] [--json FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fusion_cuda import passes, steps
from harness.command_line import parser_of, some_of
from harness.record import Record

QUESTION = "How fast are gradients packed on a GPU, and what does a training step cost there?"
PARTS = ("correctness", "passes", "steps", "bits")


def why_not() -> str | None:
    """What keeps this benchmark from running here."""
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} sees no CUDA device here, so there is nothing to measure."
            " Run this on a machine with an NVIDIA GPU and a CUDA build of torch."
        )
    from psengine.kernels import ops

    if not ops.native_available():
        return "psengine's native extension is not built (with a C++ compiler: pip install -e .)"
    if not torch._C._dispatch_has_kernel_for_dispatch_key("psengine::pack_", "CUDA"):
        return "psengine's native extension has no CUDA kernels (with nvcc on PATH: PSENGINE_CUDA=1 pip install -e .)"
    return None


def describe_device() -> str:
    properties = torch.cuda.get_device_properties(0)
    name = f"{properties.name}, {properties.multi_processor_count} SMs, {properties.total_memory / 2**30:.0f} GiB"
    return f"{name}, CUDA {torch.version.cuda}"


def main() -> None:
    parser = parser_of(__doc__, rounds=100, quick="10 rounds")
    parser.add_argument("--parts", type=some_of(PARTS), default=PARTS, help="comma-separated (default: all, in order)")
    options = parser.parse_args()
    rounds = min(10, options.rounds) if options.quick else options.rounds
    record = Record.begin("fusion_cuda", QUESTION, options, peers=(passes.COPY, steps.NATIVE))
    if reason := why_not():
        record.caveat(f"Not measured: {reason}")
        record.finish()
        return
    record.caveat(describe_device())
    measures = {
        "correctness": lambda: passes.check_bits(record),
        "passes": lambda: passes.measure(rounds, record),
        "steps": lambda: steps.measure(rounds, record),
        "bits": lambda: steps.compare_bits(options.deadline, record),
    }
    for name in options.parts:
        measures[name]()
    record.finish()


if __name__ == "__main__":
    main()
