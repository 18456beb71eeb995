"""Codecs "bf16", "fp16" and "fp32": each value, rounded to a narrower floating dtype."""

from __future__ import annotations

from typing import ClassVar

import torch
from typing_extensions import override

from psengine.codecs.base import Codec, CodecState, PayloadSpec
from psengine.kernels import ops


class Cast(Codec):
    """Base of the casts. Narrower, integer and complex values travel unchanged.

    Sums of payloads are rounded to the narrower dtype after each addition. NaN and infinities stay what they are; a
    value beyond the narrower dtype's range becomes infinite.
    """

    dtype: ClassVar[torch.dtype]

    @override
    def covers(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point and dtype.itemsize > self.dtype.itemsize

    @override
    def summed_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype

    @override
    def payload_spec(self, numel: int, dtype: torch.dtype) -> PayloadSpec:
        return PayloadSpec(self.dtype, numel)

    @override
    def encode(self, values: torch.Tensor, payload: torch.Tensor, state: CodecState | None = None) -> None:
        ops.pack_(payload, [values])

    @override
    def decode(self, payload: torch.Tensor, into: torch.Tensor) -> None:
        ops.unpack_([into], payload)


class Bfloat16(Cast):
    """Half the bytes of float32, its range, and three significant digits."""

    name = "bf16"
    dtype = torch.bfloat16


class Float16(Cast):
    """Half the bytes of float32 and four significant digits, between 6e-8 and 65504."""

    name = "fp16"
    dtype = torch.float16


class Float32(Cast):
    """Half the bytes of float64."""

    name = "fp32"
    dtype = torch.float32
