"""How fast gradients are packed on a GPU, and what that does to a training step, against torch's own ways.

python benchmarks/fusion_cuda/run.py [--quick] [--parts correctness,passes,steps,bits] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # ranks import these files under other names

from machine import describe_machine

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


def parts(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)} (expected some of {', '.join(PARTS)})")
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=parts, default=PARTS, help="comma-separated (default: all, in this order)")
    parser.add_argument("--repetitions", type=int, default=100, help="of each candidate (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="10 repetitions: noisy")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument("--deadline", type=float, default=600, metavar="S", help="seconds the two ranks may take")
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"Not measured: {reason}")
        return
    repetitions = 10 if options.quick else options.repetitions

    import passes
    import steps

    description = describe_machine(describe_device())
    print(f"{description}\n", flush=True)
    measures: dict[str, Callable[[], tuple[str, list[dict[str, Any]]]]] = {
        "correctness": passes.check_bits,
        "passes": lambda: passes.measure(repetitions),
        "steps": lambda: steps.measure(repetitions),
        "bits": lambda: steps.compare_bits(options.deadline),
    }
    rows: dict[str, list[dict[str, Any]]] = {}
    for name in options.parts:
        text, rows[name] = measures[name]()
        print(f"{text}\n", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": description, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
