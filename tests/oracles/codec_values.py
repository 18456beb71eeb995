"""What arrives of values that travel under a codec.

    values ─ + residual ─► what the codec keeps of them ─► arrives        residual: what does not

An oracle, in plain torch: it shares the codecs' names and options with psengine.codecs, and nothing else.
``REFERENCE_VALUES`` says of each codec what arrives of float32 values (``payloads`` says how); casts round values and
keep nothing.
"""

import functools
import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from oracles import payloads
from oracles.payloads import CASTS
from psengine.codecs.base import Codec

Arrives: TypeAlias = Callable[[Tensor], Tensor]


def of_blocks(codec: str) -> Arrives:
    """What the blocks of "int8", "fp4" or "onebit" keep."""

    def arrives(values: Tensor) -> Tensor:
        block = payloads.BLOCKS[codec]
        block_bytes = block.scale_bytes + block.code_bytes
        payload = torch.empty(-(-len(values) // block.numel) * block_bytes, dtype=torch.uint8)
        payloads.encode_blocks_(payload, values, codec)
        return payloads.decoded(codec, payload, len(values))

    return arrives


def topk(ratio: float = 0.01) -> Arrives:
    """The largest ``ratio`` of the values."""

    def arrives(values: Tensor) -> Tensor:
        count = max(1, math.ceil(ratio * len(values)))
        places, found = torch.empty(count, dtype=torch.int32), torch.empty(count)
        payloads.encode_largest_(places, found, values)
        return torch.zeros_like(values).index_copy_(0, places.long(), found)

    return arrives


# From a codec's options to what arrives.
REFERENCE_VALUES: dict[str, Callable[..., Arrives]] = {
    **{name: functools.partial(of_blocks, name) for name in payloads.BLOCKS},
    "topk": topk,
}


class Sender:
    """What one replica sends, time after time: what is left out goes with the next values, unless ``keeps`` is false.

    Attributes:
        residual: what was left out; None before the first values, and where nothing is kept.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self.residual: Tensor | None = None
        self._keeps = keeps
        self._former: Tensor | None = None

    def __call__(self, values: Tensor) -> Tensor:
        """What arrives, in the dtype of ``values`` or a wider one; default: the values."""
        return values

    def corrected(self, values: Tensor) -> Tensor:
        """With what was left out, in float32 at least."""
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        if not self._keeps:
            return wide
        # A sum with zeros has no negative zero.
        return wide + (torch.zeros_like(wide) if self.residual is None else self.residual)

    def keep(self, left_out: Tensor) -> None:
        """Of the values that were corrected last."""
        if self._keeps:
            self._former, self.residual = self.residual, left_out

    def spare(self, first: int, end: int) -> None:
        """What was sent last of these values did not count."""
        if self.residual is not None:
            self.residual[first:end] = 0.0 if self._former is None else self._former[first:end]


class Rounded(Sender):
    """A cast."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(keeps=False)
        self._dtype = dtype

    def __call__(self, values: Tensor) -> Tensor:
        return values.to(self._dtype).to(values.dtype)


class WithFeedback(Sender):
    """A codec whose payloads are summed after decoding."""

    def __init__(self, arrives: Arrives, *, keeps: bool = True) -> None:
        super().__init__(keeps=keeps)
        self._arrives = arrives

    def __call__(self, values: Tensor) -> Tensor:
        corrected = self.corrected(values)
        arrived = self._arrives(corrected.float()).to(corrected.dtype)
        self.keep(corrected - arrived)
        return arrived


def is_covered(codec: Codec, dtype: torch.dtype) -> bool:
    """Whether values of ``dtype`` change under the codec."""
    cast = CASTS.get(codec.name)
    return not codec.is_lossless and dtype.is_floating_point and (cast is None or dtype.itemsize > cast.itemsize)


def sender(codec: Codec, dtype: torch.dtype) -> Sender:
    """What one replica, or a server, sends of values of ``dtype``."""
    options = dict(codec.options)
    if not is_covered(codec, dtype):
        return Sender(keeps=False)
    if codec.name in CASTS:
        return Rounded(CASTS[codec.name])
    keeps = options.pop("error_feedback", True)
    return WithFeedback(REFERENCE_VALUES[codec.name](**options), keeps=keeps)
