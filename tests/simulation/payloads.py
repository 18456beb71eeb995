"""What codecs' payloads mean, in NumPy: shares no code with the codecs."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

Values: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
_INT8, _FP4, _ONEBIT = 256, 32, 512  # values in a block
# Values of a chunk, of which these codecs send blocks, or a part.
NUMEL = dict.fromkeys(("int8", "fp4", "onebit", "topk"), 256)


def decoded(codec: str, payload: torch.Tensor | bytes | memoryview, numel: int) -> Values:
    """The values of a payload, in float32 (without a codec, and of "fp32", in float64)."""
    name = codec.partition(":")[0]
    data = payload.contiguous().view(torch.uint8).numpy().tobytes() if isinstance(payload, torch.Tensor) else payload
    if not name:
        return np.frombuffer(data, np.float64)
    if name == "fp32":
        return np.frombuffer(data, np.float32).astype(np.float64)
    if name == "fp16":
        return np.frombuffer(data, np.float16).astype(np.float32)
    if name == "bf16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    if name == "topk":
        count = len(data) // 8
        values = np.zeros(numel, np.float32)
        values[np.frombuffer(data, np.int32, count)] = np.frombuffer(data, np.float32, count, 4 * count)
        return values
    return _blocks(name, np.frombuffer(data, np.uint8))[:numel]


def _blocks(name: str, data: Values) -> Values:
    if name == "int8":
        blocks = data.reshape(-1, 4 + _INT8)
        return (blocks[:, :4].copy().view(np.float32) * blocks[:, 4:].copy().view(np.int8).astype(np.float32)).ravel()
    if name == "fp4":
        blocks = data.reshape(-1, 1 + _FP4 // 2)
        codes = np.concatenate([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], axis=1)
        values = np.where(codes >= 8, -_E2M1[codes & 7], _E2M1[codes & 7])
        return (values * np.float32(2) ** (blocks[:, :1].astype(np.float32) - 127)).ravel()
    blocks = data.reshape(-1, 4 + _ONEBIT // 8)
    scales = blocks[:, :4].copy().view(np.float32)
    signs = np.unpackbits(blocks[:, 4:], axis=1, bitorder="little")
    return np.where(signs, -scales, scales).ravel()
