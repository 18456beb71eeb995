"""The trial of the codec seam: eight bits for each value, and one scale for all of them."""

from __future__ import annotations

import torch
from typing_extensions import override

from psengine import Codec
from psengine.codecs.base import CodecState, PayloadSpec

SCALE_BYTES = 4


class Int8(Codec):
    """Values divided by a scale and rounded to -127 ... 127; the scale is the largest absolute value / 127.

    The payload is the scale, a float32, and a byte for each value. An error is half a scale at most. Values that are
    not finite make the scale NaN, and so all decoded values.
    """

    name = "int8"

    @override
    def payload_spec(self, numel: int, dtype: torch.dtype) -> PayloadSpec:
        return PayloadSpec(torch.uint8, SCALE_BYTES + numel)

    @override
    def encode(self, values: torch.Tensor, payload: torch.Tensor, state: CodecState | None = None) -> None:
        largest = values.abs().amax() if values.numel() else values.new_zeros(())
        scale = (largest.double() / 127).float()
        scale = torch.where(scale.isfinite(), scale, torch.nan)
        payload[:SCALE_BYTES] = scale.view(1).view(torch.uint8)
        steps = (values.double() / scale.double()).round().nan_to_num(nan=0.0).clamp(-127, 127)
        payload[SCALE_BYTES:] = steps.to(torch.int8).view(torch.uint8)

    @override
    def decode(self, payload: torch.Tensor, into: torch.Tensor) -> None:
        scale = payload[:SCALE_BYTES].clone().view(torch.float32)
        into.copy_(payload[SCALE_BYTES:].clone().view(torch.int8).double() * scale.double())
