"""What "sync" with a codec computes, for one process that holds all replicas.

    replica 0   share ─ + residual ─ what arrives ─┐                     residual 0: what does not
    replica 1   share ─ + residual ─ what arrives ─┴─► sum ─ + residual ─ what arrives ─► the average of all

An oracle, in plain torch: it shares the codecs' names and options with psengine.codecs, and nothing else. ``ARRIVES``
says of each codec what arrives of float32 values; "powersgd" sums factors, and casts are summed as they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from psengine.codecs.base import Codec
from psengine.collectives.ring_order import add_in_ring_order
from psengine.errors import ConfigurationError
from psengine.verify.rule import Layout, MakeRule, Replicas, Rule

Arrives: TypeAlias = Callable[[Tensor], Tensor]

# ---- codecs ----------------------------------------------------------------------------------------------------------


def _blocks(values: Tensor, numel: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, -len(values) % numel)).view(-1, numel)


def int8(values: Tensor) -> Tensor:
    """Blocks of 256: steps of the largest magnitude / 127."""
    blocks = _blocks(values, 256)
    largest = blocks.abs().amax(dim=1, keepdim=True)
    most = torch.full_like(largest, 127)
    steps = (blocks * torch.where(largest > 0, most / largest, 0.0)).round()
    return (steps * (largest / most) + 0.0).view(-1)[: len(values)]  # an integer has no negative zero


def fp4(values: Tensor) -> Tensor:
    """Blocks of 32: E2M1 times the smallest power of two with which nothing is beyond 6."""
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    blocks = _blocks(values, 32)
    mantissa, exponent = torch.frexp(blocks.abs().amax(dim=1, keepdim=True))  # mantissa from 0.5 up to 1
    scale = torch.ldexp(torch.ones_like(mantissa), (exponent - 3 + (mantissa > 0.75)).clamp(min=-126))
    scaled = (blocks / scale).abs().contiguous()
    below = (torch.searchsorted(codes, scaled, right=True) - 1).clamp(0, 6)
    to_low, to_high = scaled - codes[below], codes[below + 1] - scaled
    nearest = below + ((to_low > to_high) | ((to_low == to_high) & (below % 2 == 1)))
    return torch.copysign(codes[nearest] * scale, blocks).view(-1)[: len(values)]


def onebit(values: Tensor) -> Tensor:
    """Blocks of 512: signs times the mean magnitude, which is added in sixteen lanes, and the lanes by halves."""
    blocks = _blocks(values, 512)
    counts = torch.full((len(blocks), 1), 512.0)
    counts[-1] = len(values) - 512 * (len(blocks) - 1)
    lanes = torch.zeros(len(blocks), 16)
    for part in blocks.abs().split(16, dim=1):
        lanes = lanes + part
    while lanes.shape[1] > 1:
        low, high = lanes.chunk(2, dim=1)
        lanes = low + high
    return torch.copysign(lanes / counts, blocks).view(-1)[: len(values)]


def topk(ratio: float = 0.01) -> Arrives:
    """The largest ``ratio`` of the values; of equal magnitudes the first."""

    def arrives(values: Tensor) -> Tensor:
        order = values.abs().argsort(descending=True, stable=True)
        taken = order[: max(1, math.ceil(ratio * len(values)))]
        return torch.zeros_like(values).index_copy_(0, taken, values[taken])

    return arrives


# From a codec's options to what arrives.
ARRIVES: dict[str, Callable[..., Arrives]] = {
    "int8": lambda: int8,
    "fp4": lambda: fp4,
    "onebit": lambda: onebit,
    "topk": topk,
}
CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SLICE_NUMEL = 512
# Of the payload of so many values.
SLICE_BYTES = {"int8": 520, "fp4": 272, "onebit": 68}
PIECE_BYTES = 1024 * 1024


class WithFeedback:
    """A codec that adds what it left out to the next values, unless ``keeps`` is false."""

    def __init__(self, arrives: Arrives, *, keeps: bool = True) -> None:
        self._arrives, self._keeps = arrives, keeps
        self.residual: Tensor | None = None

    def __call__(self, values: Tensor) -> Tensor:
        wide = torch.promote_types(values.dtype, torch.float32)
        corrected = values.to(wide) if self.residual is None else values.to(wide) + self.residual
        arrived = self._arrives(corrected.float())
        if self._keeps:
            self.residual = corrected - arrived
        return arrived.to(wide)


class Average:
    """The average of shares: what arrives of each is added in the order of ranks; what arrives of the sum, for "topk"
    all of it.
    """

    def __init__(self, name: str, world_size: int, *, error_feedback: bool = True, **options: Any) -> None:
        arrives = ARRIVES[name](**options)
        self.up = [WithFeedback(arrives, keeps=error_feedback) for _ in range(world_size)]
        self.down = None if name == "topk" else WithFeedback(arrives, keeps=error_feedback)
        self._name = name

    def __call__(self, shares: Sequence[Tensor]) -> Tensor:
        first, *others = [codec(share) for codec, share in zip(self.up, shares, strict=True)]
        total = first
        for arrived in others:
            total = total + arrived
        return total if self.down is None else self.down(total)

    def lay_out_anew(self) -> None:
        """Owners of slices take what was left out of the sum to their own residuals. A bucket is cut into pieces, whose
        payloads have at most 1 MiB, and each of these into a slice of whole 512 values for each rank.
        """
        if self.down is None or self.down.residual is None:
            return
        second, self.down.residual = self.down.residual, None
        row_numel = SLICE_NUMEL * len(self.up)
        rows = max(1, PIECE_BYTES // (SLICE_BYTES[self._name] * len(self.up)))
        first = 0
        for piece in second.split(rows * row_numel):
            slices = piece.split(-(-len(piece) // row_numel) * SLICE_NUMEL)
            for part, codec in zip(slices, self.up, strict=False):  # the last ranks may have none
                assert codec.residual is not None
                codec.residual[first : first + len(part)] += part
                first += len(part)


# ---- the strategy ----------------------------------------------------------------------------------------------------


def of_collective(strategy: Any, world_size: int) -> MakeRule | None:
    """The rule of "sync" with a codec; None without one.

    Raises:
        ConfigurationError: the codec has no rule here.
    """
    codec = strategy.__getstate__().get("compress")
    if codec is None or codec.is_lossless:
        return None
    if codec.name not in (*ARRIVES, *CASTS):
        raise ConfigurationError(
            f"verify has no rule of codec {codec.name!r} (expected one of {sorted([*ARRIVES, *CASTS])}). Fix: --against"
            " native, and compare losses."
        )

    def make(replicas: Replicas, layout: Layout) -> Rule:
        return CodecRule(replicas, layout, codec)

    return make


class CodecRule(Rule):
    """Averages the gradients of equal replicas.

    Args:
        replicas: the modules; their gradients are mutated.
        layout: of the training that is compared, in its last step: blocks and slices follow from its buckets.
        codec: of its strategy.
    """

    averages_gradients = True

    def __init__(self, replicas: Replicas, layout: Layout, codec: Codec) -> None:
        self._replicas, self._layout, self._codec = replicas, layout, codec
        # By the names of the bucket's parameters.
        self._averages: dict[tuple[str, ...], Average] = {}

    @override
    @torch.no_grad()
    def before_forward(self) -> None:
        """Replicas have rank 0's buffers, as native DDP's."""
        for buffers in zip(*(replica.buffers() for replica in self._replicas), strict=True):
            for buffer in buffers[1:]:
                buffer.copy_(buffers[0])

    @override
    @torch.no_grad()
    def before_step(self) -> None:
        buckets = [tuple(names) for names in self._layout()]
        if set(buckets) != set(self._averages):
            self._lay_out(buckets)
        for names in buckets:
            replicated = [[replica.get_parameter(name) for name in names] for replica in self._replicas]
            if any(p.grad is not None and p.grad.is_sparse for parameters in replicated for p in parameters):
                self._average_sparse(replicated)
            elif any(p.grad is not None for parameters in replicated for p in parameters):
                self._average(names, replicated)

    def _average(self, names: tuple[str, ...], replicated: list[list[torch.nn.Parameter]]) -> None:
        shares = [_flat_gradients(parameters) * (1.0 / len(replicated)) for parameters in replicated]
        dtype = shares[0].dtype
        cast = CASTS.get(self._codec.name)
        if cast is not None or not dtype.is_floating_point:
            narrows = cast is not None and dtype.is_floating_point and dtype.itemsize > cast.itemsize
            payloads = [share.to(cast) if narrows else share for share in shares]
            average = torch.empty_like(payloads[0])
            add_in_ring_order(payloads, average)
        else:
            average = self._averages[names](shares)
        used = [any(p.grad is not None for p in alike) for alike in zip(*replicated, strict=True)]
        for parameters in replicated:
            _write_gradients(parameters, average.to(dtype), used)

    def _average_sparse(self, replicated: list[list[torch.nn.Parameter]]) -> None:
        for alike in zip(*replicated, strict=True):
            dense = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in alike]
            average = torch.empty_like(dense[0])
            add_in_ring_order([gradient * (1.0 / len(dense)) for gradient in dense], average)
            for p in alike:
                p.grad = average.to_sparse(1)

    def _lay_out(self, buckets: Sequence[tuple[str, ...]]) -> None:
        """Residuals move with their parameters."""
        residuals: list[dict[str, Tensor]] = [{} for _ in self._replicas]
        for names, average in self._averages.items():
            average.lay_out_anew()
            sizes = [self._replicas[0].get_parameter(name).numel() for name in names]
            for kept, codec in zip(residuals, average.up, strict=True):
                if codec.residual is not None:
                    kept.update(zip(names, codec.residual.split(sizes), strict=True))
        self._averages = {}
        if self._codec.name in CASTS:
            return
        for names in buckets:
            average = self._averages[names] = Average(self._codec.name, len(residuals), **self._codec.options)
            for kept, codec in zip(residuals, average.up, strict=True):
                if names[0] in kept:
                    codec.residual = torch.cat([kept[name] for name in names])


def _in_memory_order(flat: Tensor, parameter: torch.nn.Parameter) -> Tensor:
    """``flat``, in the shape of the parameter, and laid out as it is if it has no gaps."""
    dense = torch.empty_like(parameter)  # keeps strides that have neither gaps nor overlaps
    return flat.as_strided(parameter.shape, dense.stride())


def _flat_gradients(parameters: Sequence[torch.nn.Parameter]) -> Tensor:
    parts = []
    for parameter in parameters:
        part = torch.zeros(parameter.numel(), dtype=parameter.dtype)
        if parameter.grad is not None:
            _in_memory_order(part, parameter).copy_(parameter.grad)
        parts.append(part)
    return torch.cat(parts)


def _write_gradients(parameters: Sequence[torch.nn.Parameter], average: Tensor, used: Sequence[bool]) -> None:
    """Of those that some replica used, as native DDP does."""
    parts = average.split([p.numel() for p in parameters])
    for parameter, part in itertools.compress(zip(parameters, parts, strict=True), used):
        values = _in_memory_order(part.clone(), parameter)
        if parameter.grad is None:
            parameter.grad = values
        else:
            parameter.grad.copy_(values)
