"""Encodes one chunk's gradients and decodes the servers' answers, on the threads of the training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from psengine.codecs.base import Codec
from psengine.flat_optimizers.finite import is_finite
from psengine.parameter_server.chunk_codecs import answer_codec, answers_differences, gradient_codec, held_dtype
from psengine.protocol.layout import ChunkSpec

if TYPE_CHECKING:
    from psengine.parameter_server.client.operation import Push


class ChunkEncoder:
    """The codec of one chunk, at a worker.

    Args:
        spec: the chunk.
        codec: the job's.
        are_weights: whether answers are the chunk's weights, or averages.

    Attributes:
        forms: those in which the servers' values arrive: dtype and number.
        decodes: whether they arrive encoded.
        state: the residual of earlier payloads; None where the codec keeps nothing.
        held: number of the exchange whose answer this worker holds, where others are differences from it; None before
            the first.
        last: the push whose payload was encoded last.
    """

    def __init__(self, spec: ChunkSpec, codec: Codec, *, are_weights: bool) -> None:
        self._spec = spec
        self._up, self._down = gradient_codec(codec, spec), answer_codec(codec, spec)
        self._form = self._up.payload_spec(spec.numel, spec.dtype)
        answer = self._down.payload_spec(spec.numel, spec.dtype)
        self.forms = [(answer.dtype, answer.numel)]
        self.decodes = not self._down.is_identity
        self._answers_differences = are_weights and answers_differences(codec, spec)
        if self._answers_differences:
            self.forms.append((spec.dtype, spec.numel))
        self.held: int | None = None
        self.last: Push | None = None
        self._held = torch.empty(0)
        # Whether the last payload is part of the average that comes.
        self._counted = False
        self.state = self._up.make_state(spec.numel, spec.dtype, torch.device("cpu"))

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the payload of ``values``, in memory of its own."""
        payload = torch.empty(self._form.numel, dtype=self._form.dtype)
        self._up.encode(values.detach().view(-1), payload, self.state)
        return payload

    def end(self, *, counts: bool) -> None:
        """Whether the payload that was encoded last counts: one that does not is given back to the state."""
        self._counted = counts
        if self.state is not None and not counts:
            self.state.give_back()

    def decode(self, payload: torch.Tensor, destinations: Sequence[torch.Tensor], sequence: int) -> torch.Tensor:
        """The values of the answer of exchange ``sequence``, also written to ``destinations``, one after the other.

        They stay as they are until the next is decoded. For an average that is not finite training code skips the step,
        so what was sent did not count.
        """
        if self._answers_differences:
            self._hold(payload, sequence)
            values = self._held.to(self._spec.dtype)
        else:
            is_alone = len(destinations) == 1
            values = destinations[0].view(-1) if is_alone else torch.empty(self._spec.numel, dtype=self._spec.dtype)
            self._down.decode(payload, values)
            if self.state is not None and self._counted and not is_finite(values):
                self.state.give_back()
            self._counted = False
        if destinations and destinations[0].data_ptr() != values.data_ptr():
            parts = values.split([destination.numel() for destination in destinations])
            for destination, part in zip(destinations, parts, strict=True):
                destination.view(-1).copy_(part)
        return values

    def _hold(self, payload: torch.Tensor, sequence: int) -> None:
        if (payload.dtype, payload.numel()) == (self._spec.dtype, self._spec.numel):
            self._held = payload.to(held_dtype(self._spec), copy=True)
        else:
            self._down.decode_add(payload, self._held)
        self.held = sequence
