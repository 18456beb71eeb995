"""What a codec's passes over a bucket cost, against a copy of the bytes that they read and write.

python benchmarks/codecs/run.py [--megabytes 25] [--kernels avx512 avx2 baseline] [--rounds 30] [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.command_line import at_least, parser_of
from harness.record import Record
from harness.turns import Turn, copy_of, take_turns

from psengine.codecs.registry import resolve_codec
from psengine.kernels import native, ops

QUESTION = "How fast are a codec's passes over memory, against a copy of the same bytes?"
OURS, COPY = "psengine", "copy"
CODECS = ("bf16", "int8", "fp4", "onebit", "topk:ratio=0.01", "topk:ratio=0.001")
KERNELS = ("avx512", "avx2", "baseline")
WARM_UP_ROUNDS = 3


def passes_of(name: str, numel: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """By pass the bytes that it reads and writes, and the call. Encoding reads and writes a residual, if any."""
    codec, generator = resolve_codec(name), torch.Generator().manual_seed(0)
    values, total = torch.randn(numel, generator=generator), torch.randn(numel, generator=generator)
    spec = codec.payload_spec(numel, torch.float32)
    payload = torch.zeros(spec.numel, dtype=spec.dtype)
    state = codec.make_state(numel, torch.float32, torch.device("cpu"))
    codec.encode(values, payload, state)
    residual_bytes = 0 if state is None else 2 * values.nbytes
    passes: dict[str, tuple[int, Callable[[], object]]] = {
        "encode": (values.nbytes + residual_bytes + payload.nbytes, lambda: codec.encode(values, payload, state))
    }
    if not name.startswith("topk"):
        passes["decode"] = (payload.nbytes + values.nbytes, lambda: codec.decode(payload, total))
    if codec.summed_dtype(torch.float32) is None and not name.startswith("topk"):
        passes["decode and add"] = (payload.nbytes + 2 * values.nbytes, lambda: codec.decode_add(payload, total))
    return passes


def main() -> None:
    parser = parser_of(__doc__, rounds=30, quick="3 rounds and 1 MB")
    parser.add_argument("--megabytes", type=at_least(1), default=25, help="of float32 values (default: %(default)s)")
    parser.add_argument("--kernels", choices=KERNELS, nargs="+", default=KERNELS, help="default: all")
    options = parser.parse_args()
    if not ops.native_available():
        sys.exit("psengine's native extension is not built here: pip install -e .")
    torch.set_num_threads(1)
    rounds = min(3, options.rounds) if options.quick else options.rounds
    numel = (1 if options.quick else options.megabytes) * 2**20 // 4
    record = Record.begin("codecs", QUESTION, options, peers=(COPY,))
    best = ops.native_kernels()
    try:
        for kernels in options.kernels:
            if not native.extension._use_kernels(kernels):  # type: ignore[attr-defined]
                record.caveat(f"This processor cannot run the kernels for {kernels}: their rows are missing.")
                continue
            for name in CODECS:
                for what, (moved_bytes, call) in passes_of(name, numel).items():
                    turns = {COPY: Turn(copy_of(moved_bytes)), OURS: Turn(call)}
                    seconds = take_turns(turns, rounds, warm_up=WARM_UP_ROUNDS)
                    labels = {
                        "kernels": kernels,
                        "codec": name,
                        "pass": what,
                        "bytes/value": f"{moved_bytes / numel:.2f}",
                    }
                    record.add(labels, seconds)
    finally:
        native.extension._use_kernels(best)  # type: ignore[attr-defined]
    record.finish()


if __name__ == "__main__":
    main()
