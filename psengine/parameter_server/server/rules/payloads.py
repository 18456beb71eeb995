"""A chunk's payloads: pushes are decoded to values, answers are encoded, perhaps as differences.

    server   weights - held ─ encode ─► payload ─┬─────────► worker   held += decode(payload)
             held += decode(payload) ◄───────────┘

Where answers are differences, both ends add the same values, so they hold the same bits, and what a payload leaves out
is part of the next difference: no residual is needed. A worker says with each push which step's answer it holds. If the
server does not know that one (a first push, a server that restarted), it answers whole weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from psengine.codecs.base import Codec, CodecState, PayloadSpec
from psengine.codecs.identity import IDENTITY
from psengine.codecs.registry import resolve_codec
from psengine.errors import ConfigurationError, ProtocolError
from psengine.parameter_server.chunk_codecs import answer_codec, answers_differences, gradient_codec, held_dtype
from psengine.protocol.frames import payload_tensor
from psengine.protocol.layout import ChunkSpec
from psengine.protocol.messages import ErrorCode, Message


def codec_of(rule: Mapping[str, Any]) -> Codec:
    """The codec that a rule of HELLO names.

    Raises:
        ProtocolError: this server knows no such codec, or it has no such options.
    """
    if "compress" not in rule:
        return IDENTITY
    try:
        return resolve_codec(rule["compress"])
    except (ConfigurationError, TypeError, ValueError) as error:
        raise ProtocolError(
            f"a job's servers need its codec (got compress={rule['compress']}: {error}). Fix: start them with --plugins"
            " MODULE, a module that calls psengine.register_codec, or set PSENGINE_PLUGINS.",
            ErrorCode.RULE_MISMATCH,
        ) from None


def received_values(message: Message, spec: ChunkSpec) -> torch.Tensor:
    """The payload that is a chunk's values: 1-D, read-only, valid for as long as it is referenced.

    Raises:
        ProtocolError: there is no payload, or it is not of the chunk's dtype and size.
    """
    return _payload(message, spec, PayloadSpec(spec.dtype, spec.numel), "values")


@dataclass(slots=True)
class HeldWeights:
    """What one worker holds of a chunk. Kept too where stale gradients are corrected, for which nothing is added."""

    version: int  # of the weights that were answered
    values: torch.Tensor  # what the worker holds; mutated by the next difference
    step: int | None  # whose answer brought them; None: it may hold something else
    # That answer's; never changed, because it may still be on its way, or have to go again. None: the values' own.
    payload: torch.Tensor | None = None

    @property
    def size_bytes(self) -> int:
        """Memory of both tensors."""
        return self.values.nbytes + (0 if self.payload is None else self.payload.nbytes)


class ChunkPayloads:
    """The payloads of one chunk, in a job with this codec."""

    def __init__(self, spec: ChunkSpec, codec: Codec) -> None:
        self._spec = spec
        self._up, self._down = gradient_codec(codec, spec), answer_codec(codec, spec)
        self._what = "values" if self._up.is_identity else f"elements ({self._up})"
        self._pushed = self._up.payload_spec(spec.numel, spec.dtype)
        self._answered = self._down.payload_spec(spec.numel, spec.dtype)
        self.encodes_answers = not self._down.is_identity  # whether ``encode`` makes other memory
        self.answer_bytes = self._answered.size_bytes
        self.answers_differences = answers_differences(codec, spec)

    def decode(self, message: Message) -> torch.Tensor:
        """PUSH: the values of its payload: 1-D, read-only, valid for as long as they are referenced.

        Raises:
            ProtocolError: there is no payload, or none that the codec makes.
        """
        payload = _payload(message, self._spec, self._pushed, self._what)
        if self._up.is_identity:
            return payload
        values = torch.empty(self._spec.numel, dtype=self._spec.dtype)
        self._up.decode(payload, values)
        return values

    def make_state(self) -> CodecState | None:
        """The state of averages, before the first; None where their payloads leave nothing out for later."""
        return self._down.make_state(self._spec.numel, self._spec.dtype, torch.device("cpu"))

    def encode(self, values: torch.Tensor, state: CodecState | None = None) -> torch.Tensor:
        """The payload of an answer; ``values`` themselves where the codec does not encode answers."""
        if not self.encodes_answers:
            return values
        payload = torch.empty(self._answered.numel, dtype=self._answered.dtype)
        self._down.encode(values, payload, state)
        return payload

    def next_held(
        self, held: HeldWeights | None, step: int, version: int, weights: torch.Tensor, *, repeated: bool
    ) -> HeldWeights:
        """What a worker holds with the answer of a step; a repeat is what the first answer was, if that is known.

        If it is not, the worker may have either of two answers, and the next difference is of neither.
        """
        if held is not None and held.step == step:
            return held
        if not self.answers_differences:
            return HeldWeights(version, weights.clone(), step)
        if held is None or held.step is None or repeated:
            wide = weights.to(held_dtype(self._spec), copy=True)
            return HeldWeights(version, wide, None if repeated else step, weights.clone())
        payload = self.encode(weights.to(held.values.dtype) - held.values)
        self._down.decode_add(payload, held.values)  # as the worker does
        return HeldWeights(version, held.values, step, payload)

    def answered(self, message: Message) -> torch.Tensor:
        """RESULT: what travelled as an answer, to travel again.

        Raises:
            ProtocolError: there is no payload, or none that the codec makes.
        """
        payload = _payload(message, self._spec, self._answered, "elements of an answer")
        if self.encodes_answers:
            self._down.decode(payload, torch.empty(self._spec.numel, dtype=self._spec.dtype))
        return payload


def _payload(message: Message, spec: ChunkSpec, form: PayloadSpec, what: str) -> torch.Tensor:
    if message.payload is None or message.dtype is not form.dtype or message.numel != form.numel:
        got = "none" if message.payload is None else f"{message.numel} of {message.dtype}"
        raise ProtocolError(f"{spec.describe()}: expected {form.numel} {what} of {form.dtype}, got {got}")
    return payload_tensor(message)
