"""Codec "topk": the values of the largest magnitude, with their places."""

from __future__ import annotations

import math

import torch
from typing_extensions import override

from psengine.codecs.base import Codec, CodecState, PayloadSpec
from psengine.codecs.blocks import checked_flag
from psengine.errors import ConfigurationError, ProtocolError
from psengine.kernels import codec_ops

PLACE_BYTES = 4
VALUE_BYTES = 4


class TopK(Codec):
    """A share of the values, those of the largest magnitude, with error feedback. Eight bytes for each.

    Aji and Heafield 2017, "Sparse Communication for Distributed Gradient Descent"
    (https://arxiv.org/abs/1704.05021). The payload is the places (int32, ascending), then the values (float32).
    Of equal magnitudes the first are taken. NaN and infinities are larger than all others.

    Args:
        ratio: which share of a bucket's values travels, above 0 and up to 1; at least one value. Smaller is less to
            send, and more steps until a small gradient arrives.
        error_feedback: keep what is left out and add it to the next values. Without it training may diverge.
    """

    name = "topk"

    def __init__(self, *, ratio: float = 0.01, error_feedback: bool = True) -> None:
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
            raise ConfigurationError(f"ratio of codec 'topk' (expected above 0 and at most 1, got {ratio!r})")
        self._ratio = ratio
        self._has_feedback = checked_flag(self.name, "error_feedback", error_feedback)

    def _count(self, numel: int) -> int:
        return min(numel, max(1, math.ceil(self._ratio * numel)))

    @override
    def payload_spec(self, numel: int, dtype: torch.dtype) -> PayloadSpec:
        return PayloadSpec(torch.uint8, self._count(numel) * (PLACE_BYTES + VALUE_BYTES))

    @override
    def make_state(self, numel: int, dtype: torch.dtype, device: torch.device) -> CodecState | None:
        return CodecState(numel, dtype, device) if self._has_feedback else None

    @override
    def encode(self, values: torch.Tensor, payload: torch.Tensor, state: CodecState | None = None) -> None:
        count = self._count(values.numel())
        places = torch.empty(count, dtype=torch.int32, device=values.device)
        found = torch.empty(count, dtype=torch.float32, device=values.device)
        if state is None:
            codec_ops.encode_largest_(places, found, values)
        else:
            codec_ops.encode_largest_(places, found, values, state.residual, state.next_residual())
            state.keep()
        payload[: count * PLACE_BYTES] = places.view(torch.uint8)
        payload[count * PLACE_BYTES :] = found.view(torch.uint8)

    @override
    def decode(self, payload: torch.Tensor, into: torch.Tensor) -> None:
        places, found = self._read(payload, into.numel())
        into.zero_()
        into[places] = found.to(into.dtype)

    @override
    def decode_add(self, payload: torch.Tensor, total: torch.Tensor) -> None:
        places, found = self._read(payload, total.numel())
        total.index_add_(0, places, found.to(total.dtype))  # total[places] += ... gathers first, and is slower

    def _read(self, payload: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        count = self._count(numel)
        # Copies, because the payload may begin at any byte.
        places = payload[: count * PLACE_BYTES].clone().view(torch.int32).long()
        found = payload[count * PLACE_BYTES :].clone().view(torch.float32)
        if count and not (places[0] >= 0 and places[-1] < numel and bool((places.diff() > 0).all())):
            raise ProtocolError(
                f"a payload of 'topk' names places in ascending order (expected {count} of 0 to {numel - 1}, got"
                f" {places[:8].tolist()}{' ...' if count > 8 else ''})"
            )
        return places, found
