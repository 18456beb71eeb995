"""A codec with a residual: the one value that is largest, and what was left out goes with later payloads."""

import torch
from typing_extensions import override

import psengine
from psengine import Codec
from psengine.codecs.base import CodecState, PayloadSpec
from psengine.codecs.registry import CODECS
from psengine.errors import ProtocolError


class TopOne(Codec):
    """The value of the largest magnitude, with error feedback (Seide et al. 2014). The payload is place and value."""

    name = "top1"
    encodes_answers = False

    @override
    def payload_spec(self, numel: int, dtype: torch.dtype) -> PayloadSpec:
        return PayloadSpec(torch.float64, 2)

    @override
    def make_state(self, numel: int, dtype: torch.dtype, device: torch.device) -> CodecState:
        return CodecState(numel, dtype, device)

    @override
    def encode(self, values: torch.Tensor, payload: torch.Tensor, state: CodecState | None = None) -> None:
        corrected = values.clone() if state is None else values + state.residual
        place = int(corrected.abs().double().nan_to_num(nan=torch.inf).argmax())
        payload[0], payload[1] = place, corrected[place].double()
        if state is not None:
            corrected[place] = 0
            state.replace(corrected)

    @override
    def decode(self, payload: torch.Tensor, into: torch.Tensor) -> None:
        place = float(payload[0])
        if not 0 <= place < into.numel() or place != int(place):
            raise ProtocolError(f"a payload of 'top1' names a place (expected 0 to {into.numel() - 1}, got {place})")
        into.zero_()
        into[int(place)] = payload[1]


def register() -> None:
    """Register it in this process, a rank's or a server's, as a user's module would; a second time does nothing."""
    if TopOne.name not in CODECS:
        psengine.register_codec(TopOne.name, TopOne)
