"""Encodes one chunk's gradients and decodes the servers' answers, on the threads of the training."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psengine.codecs.base import Codec
from psengine.codecs.exchange_outcome import ExchangeOutcome
from psengine.parameter_server.chunk_codecs import answer_codec, gradient_codec
from psengine.protocol.layout import ChunkSpec


class ChunkEncoder:
    """The codec of one chunk, at a worker.

    Args:
        spec: the chunk.
        codec: the job's.

    Attributes:
        answer: the form in which the servers' values arrive.
        decodes: whether that is another form than the chunk's own.
        state: the residual of earlier payloads; None where the codec keeps nothing.
    """

    def __init__(self, spec: ChunkSpec, codec: Codec) -> None:
        self._spec = spec
        self._up, self._down = gradient_codec(codec, spec), answer_codec(codec, spec)
        self._form = self._up.payload_spec(spec.numel, spec.dtype)
        self.answer = self._down.payload_spec(spec.numel, spec.dtype)
        self.decodes = not self._down.is_identity
        self.state = self._up.make_state(spec.numel, spec.dtype, torch.device("cpu"))

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the payload of ``values``, in memory of its own."""
        payload = torch.empty(self._form.numel, dtype=self._form.dtype)
        self._up.encode(values.detach().view(-1), payload, self.state)
        return payload

    def end(self, outcome: ExchangeOutcome) -> None:
        """The payload that was encoded last had this outcome: one that did not count is given back to the state."""
        if self.state is not None and not outcome.counts:
            self.state.give_back()

    def decode(self, payload: torch.Tensor, destinations: Sequence[torch.Tensor]) -> None:
        """Write the values of an answer to ``destinations``, one after the other."""
        if len(destinations) == 1:
            self._down.decode(payload, destinations[0].view(-1))
            return
        values = torch.empty(self._spec.numel, dtype=self._spec.dtype)
        self._down.decode(payload, values)
        parts = values.split([destination.numel() for destination in destinations])
        for destination, part in zip(destinations, parts, strict=True):
            destination.view(-1).copy_(part)
