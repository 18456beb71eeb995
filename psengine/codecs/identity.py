"""Codec "none": the payload is the values."""

from __future__ import annotations

import torch
from typing_extensions import override

from psengine.codecs.base import Codec, CodecState, PayloadSpec


class Identity(Codec):
    """Values of any dtype, as they are."""

    name = "none"
    is_lossless = True
    is_identity = True

    @override
    def covers(self, dtype: torch.dtype) -> bool:
        return True

    @override
    def summed_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    @override
    def payload_spec(self, numel: int, dtype: torch.dtype) -> PayloadSpec:
        return PayloadSpec(dtype, numel)

    @override
    def encode(self, values: torch.Tensor, payload: torch.Tensor, state: CodecState | None = None) -> None:
        payload.copy_(values)

    @override
    def decode(self, payload: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(payload)


IDENTITY = Identity()
