"""The outer step of DiLoCo: torch.optim.SGD with the average of the replicas' differences.

::

    anchor - parameters ─ codec ─ average ─► outer gradient
    anchor ─ SGD with the outer gradient ─► anchor ─► parameters

The anchors are what replicas agreed on last; they have the same bits on all.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from psengine.strategies.local.options import RoundOptions
from psengine.tensors.bucket import Bucket


class OuterStep:
    """Anchors of ``parameters``, given by name, and the optimizer that moves them.

    Attributes:
        anchors: what replicas agreed on last, by name of the parameter.
        optimizer: of the anchors.
    """

    @torch.no_grad()
    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], options: RoundOptions) -> None:
        self._parameters: list[torch.Tensor] = list(parameters.values())
        self.anchors = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        momentum = options.outer_momentum
        self.optimizer = torch.optim.SGD(
            list(self.anchors.values()), options.outer_lr, momentum, nesterov=momentum > 0, foreach=False
        )

    def settle(self) -> None:
        """The parameters become the anchors, and the momentum begins anew."""
        self.follow()
        self.optimizer.state.clear()

    def follow(self) -> None:
        """The parameters become the anchors."""
        torch._foreach_copy_(list(self.anchors.values()), self._parameters)

    def anchors_of(self, bucket: Bucket) -> list[torch.Tensor]:
        """The anchors of a bucket's parameters."""
        return [self.anchors[name] for name in bucket.names]

    def differences(self, bucket: Bucket) -> list[torch.Tensor]:
        """How far a bucket's parameters went from their anchors."""
        return list(torch._foreach_sub(self.anchors_of(bucket), bucket.parameters))

    def take(self, bucket: Bucket, average: torch.Tensor) -> None:
        """Step the anchors of a bucket's parameters with the average of differences, laid out like its memory."""
        anchors = self.anchors_of(bucket)
        gradients = [torch.empty_like(anchor) for anchor in anchors]
        bucket.unpack(gradients, average)
        for anchor, gradient in zip(anchors, gradients, strict=True):
            anchor.grad = gradient
        self.optimizer.step()
        for anchor in anchors:
            anchor.grad = None

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Copies of anchors and momenta, by name of the parameter."""
        slots = {name: self.optimizer.state.get(one, {}).get("momentum_buffer") for name, one in self.anchors.items()}
        return {
            "anchors": {name: anchor.clone() for name, anchor in self.anchors.items()},
            "momenta": {name: slot.clone() for name, slot in slots.items() if slot is not None},
        }

    def load(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Continue from ``state()``; KeyError where a parameter has none."""
        self.optimizer.state.clear()
        for name, anchor in self.anchors.items():
            anchor.copy_(state["anchors"][name])
            if name in state["momenta"]:
                momentum = torch.empty_like(anchor).copy_(state["momenta"][name])
                self.optimizer.state[anchor]["momentum_buffer"] = momentum
