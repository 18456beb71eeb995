"""Measures how fast a codec encodes and decodes on one core of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from psengine.cli.advising.scale import CANDIDATES
from psengine.cli.advising.traffic import HIERARCHICAL, Coding, codec_of
from psengine.codecs.base import Codec

# The first pass touches new memory.
_PASSES = 7
# What is measured where the model's shapes are not known: matrices of so many columns, and no more than this of them.
COLUMNS = 1024
MOST_BYTES = 16 << 20


def codings_of(value_bytes: float) -> dict[str, Coding]:
    """Measure the codecs that are candidates, by name, on as many values or 16 MiB; takes about a second."""
    rows = max(1, int(min(value_bytes, MOST_BYTES)) // (4 * COLUMNS))
    codecs = [codec_of(strategy) for strategy in CANDIDATES if strategy != HIERARCHICAL]
    return {codec.name: coding_of(codec, [(rows, COLUMNS)]) for codec in codecs if codec is not None}


def coding_of(codec: Codec, shapes: Sequence[Sequence[int]]) -> Coding:
    """Encode and decode gradients of these shapes: normal values, one thread."""
    numels = [torch.Size(shape).numel() for shape in shapes]
    codec = codec.for_pieces(
        [(n, n // shape[0] if len(shape) > 1 else 0) for n, shape in zip(numels, shapes, strict=True)]
    )
    values = torch.randn(sum(numels), generator=torch.Generator().manual_seed(0))
    spec = codec.payload_spec(values.numel(), values.dtype)
    payload = torch.empty(spec.numel, dtype=spec.dtype)
    state = codec.make_state(values.numel(), values.dtype, values.device)

    def all_rounds() -> None:
        sums = codec.sum_rounds(values, arrived, state)
        with suppress(StopIteration):
            sums.send(sums.send(next(sums)))

    arrived, size = torch.empty_like(values), values.nbytes
    ratio = spec.size_bytes / size
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if codec.summed_dtype(values.dtype) is not None:
            return Coding(payload=ratio)  # packing and unpacking convert
        if codec.is_summed_in_rounds:
            return Coding(payload=ratio, encode_s=_seconds(all_rounds) / size)
        return Coding(
            payload=ratio,
            encode_s=_seconds(lambda: codec.encode(values, payload, state)) / size,
            decode_s=_seconds(lambda: codec.decode(payload, values)) / size,
            decode_add_s=_seconds(lambda: codec.decode_add(payload, values)) / size,
        )
    finally:
        torch.set_num_threads(threads)


def _seconds(run: Callable[[], object]) -> float:
    """The core's time, in which other programs' turns do not count."""
    best_s = float("inf")
    for _ in range(_PASSES):
        began_s = time.thread_time()
        run()
        best_s = min(best_s, time.thread_time() - began_s)
    return best_s
