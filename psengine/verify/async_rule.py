"""What "async" computes with a codec for one worker.

    worker   gradient ─ + residual ─ what arrives ─► server: the optimizer steps its weights
             held += what arrives ◄─ weights - held ◄┘         the worker trains on what it holds

The first answer is whole weights. The server knows what the worker holds, so what a difference leaves out is part of
the next one, without a residual. A cast sends the weights themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from psengine.codecs.base import Codec
from psengine.codecs.registry import resolve_codec
from psengine.verify.codec_values import CASTS, Sender, check_has_rule, is_covered, sender
from psengine.verify.parts import Part, elements, gather, in_memory_order, pieces_of, scatter
from psengine.verify.rule import Layout, MakeRule, Replicas, Rule


def of_servers(strategy: Any, world_size: int) -> MakeRule | None:
    """The rule of "async" with a codec; None without one, and among several workers.

    One worker's updates without a codec are plain training. What several compute depends on when gradients arrive.

    Raises:
        ConfigurationError: the codec has no rule.
    """
    codec = resolve_codec(strategy.__getstate__()["compress"])
    check_has_rule(codec)
    if codec.is_lossless or world_size > 1:
        return None
    return lambda replicas, layout: AsyncRule(replicas, layout, codec)


class AsyncRule(Rule):
    """Applies the rule to the only replica, whose optimizer is the server's.

    Args:
        replicas: one module; its parameters are mutated, its gradients are those of the server during the step.
        layout: of the training that is compared: blocks follow from its chunks.
        codec: of its strategy.
    """

    averages_gradients = True

    def __init__(self, replicas: Replicas, layout: Layout, codec: Codec) -> None:
        (self._replica,) = replicas
        self._codec = codec
        self._parameters = {name: one for name, one in self._replica.named_parameters() if one.requires_grad}
        self._chunks = [_Chunk(parts, self._replica, codec) for parts in layout()]
        self._weights = self._elements()
        self._own_gradients: dict[str, Tensor | None] = {}

    def _elements(self) -> dict[str, Tensor]:
        return {name: elements(one, one) for name, one in self._parameters.items()}

    def _load(self, flats: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(in_memory_order(flats[name], parameter))

    @override
    @torch.no_grad()
    def before_step(self) -> None:
        """The server's weights, and the gradients that arrive, take the places of the worker's."""
        self._own_gradients = {name: one.grad for name, one in self._parameters.items()}
        flats = {name: elements(one.grad, one) for name, one in self._parameters.items()}
        for chunk in self._chunks:
            # A chunk without any gradient is not sent.
            if any(self._own_gradients[part.name] is not None for part in chunk.parts):
                values = gather(flats, chunk.parts)
                scatter(chunk.gradients(values).to(values.dtype), chunk.parts, flats)
        self._load(self._weights)
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                parameter.grad = in_memory_order(flats[name], parameter)

    @override
    @torch.no_grad()
    def after_step(self) -> None:
        """The worker has its gradients again, and the weights that arrive."""
        self._weights = self._elements()
        flats = self._elements()
        for chunk in self._chunks:
            scatter(chunk.answer(gather(self._weights, chunk.parts)), chunk.parts, flats)
        self._load(flats)
        for name, parameter in self._parameters.items():
            parameter.grad = self._own_gradients[name]


class _Chunk:
    """What travels up and down of some parts."""

    def __init__(self, parts: Sequence[Part], replica: torch.nn.Module, codec: Codec) -> None:
        self.parts = parts
        self._codec = codec
        self._dtype = replica.get_parameter(parts[0].name).dtype
        self._pieces = pieces_of(parts, replica)
        self.gradients = self._new_sender()
        self._held: Tensor | None = None

    def _new_sender(self) -> Sender:
        return sender(self._codec, self._dtype, self._pieces)

    def answer(self, weights: Tensor) -> Tensor:
        """What the worker holds after an answer; ``weights`` are the server's."""
        if self._codec.name in CASTS or not is_covered(self._codec, self._dtype):
            return self._new_sender()(weights)
        wide = weights.to(torch.promote_types(self._dtype, torch.float32))
        # A new sender has no residual.
        self._held = wide if self._held is None else self._held + self._new_sender()(wide - self._held)
        return self._held.to(self._dtype)
