"""Base of the codecs that write a scale and small codes for each block of values: "int8", "fp4", "onebit"."""

from __future__ import annotations

from typing import ClassVar

import torch
from typing_extensions import override

from psengine.codecs.base import Codec, CodecState, PayloadSpec
from psengine.environment.installation import BUILD_COMMAND
from psengine.errors import ConfigurationError
from psengine.kernels import codec_ops, native
from psengine.kernels.codec_ops import BlockForm

# Blocks of all forms end here, so that every one of these codecs cuts alike.
SLICE_NUMEL = 512


class BlockCodec(Codec):
    """A scale and codes for each block; see ``form``.

    A block with a value that is not finite, or above 2.5e38, decodes to NaN.

    Args:
        error_feedback: keep what a payload leaves out and add it to the next values. Without it the loss is
            ordinary rounding each time, always in the same direction for equal values, and no memory is needed.

    Raises:
        ConfigurationError: the native extension, which has its arithmetic, is missing.
    """

    form: ClassVar[BlockForm]
    slice_numel = SLICE_NUMEL

    def __init__(self, *, error_feedback: bool = True) -> None:
        if native.extension is None:
            raise ConfigurationError(
                f"codec {self.name!r} needs psengine's native extension ({native.reason}). Fix: {BUILD_COMMAND}, with a"
                ' C++ compiler; or take "bf16" or "topk", which do without'
            )
        self._has_feedback = checked_flag(self.name, "error_feedback", error_feedback)

    @override
    def payload_spec(self, numel: int, dtype: torch.dtype) -> PayloadSpec:
        return PayloadSpec(torch.uint8, self.form.payload_bytes(numel))

    @override
    def make_state(self, numel: int, dtype: torch.dtype, device: torch.device) -> CodecState | None:
        return CodecState(numel, dtype, device) if self._has_feedback else None

    @override
    def encode(self, values: torch.Tensor, payload: torch.Tensor, state: CodecState | None = None) -> None:
        if state is None:
            codec_ops.encode_blocks_(payload, values, self.form)
            return
        codec_ops.encode_blocks_(payload, values, self.form, state.residual, state.next_residual())
        state.keep()

    @override
    def decode(self, payload: torch.Tensor, into: torch.Tensor) -> None:
        codec_ops.decode_blocks_(into, payload, self.form)

    @override
    def decode_add(self, payload: torch.Tensor, total: torch.Tensor) -> None:
        codec_ops.decode_blocks_(total, payload, self.form, adds=True)


def checked_flag(codec: str, option: str, value: object) -> bool:
    """``value`` if it is true or false; else ConfigurationError."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{option} of codec {codec!r} (expected true or false, got {value!r})")
    return value
