"""``Rule``: what a strategy computes, for one process that holds all replicas.

::

    before_forward ─ each replica: forward, backward ─ before_step ─ each optimizer: step ─ after_step

A rule is an oracle: its code is written from the strategy's paper or page, apart from the strategy's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from psengine.verify.parts import Part

Replicas: TypeAlias = Sequence[torch.nn.Module]
# The parts of parameters that travel together, by bucket or chunk, in the last step of the training that
# is compared with the rule; the same object until they are laid out anew.
Layout: TypeAlias = Callable[[], Sequence[Sequence[Part]]]


class Rule:
    """Changes ``replicas``, equal at the start, as the strategy does; by default not at all.

    Attributes:
        averages_gradients: whether replicas exchange anything between backward and an optimizer's step.
        exchanges_buffers: whether replicas exchange buffers where the strategy does; the wrapper's
            ``forward_sync_buffers``.
    """

    averages_gradients = False
    exchanges_buffers = True

    def before_forward(self) -> None:
        """Replicas begin a step."""

    def before_step(self) -> None:
        """All replicas have this step's gradients, which may be changed."""

    def after_step(self) -> None:
        """All optimizers have stepped."""


MakeRule: TypeAlias = Callable[[Replicas, Layout], Rule]
