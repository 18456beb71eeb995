"""``Rule``: what a strategy computes, for one process that holds all replicas.

::

    before_forward ─ each replica: forward, backward ─ before_step ─ each optimizer: step ─ after_step

A rule is an oracle: its code is written from the strategy's paper or page, apart from the strategy's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

Replicas: TypeAlias = Sequence[torch.nn.Module]
# Names of the parameters of each bucket of the training that is compared with the rule, in the step it took last.
Layout: TypeAlias = Callable[[], Sequence[Sequence[str]]]


class Rule:
    """Changes ``replicas``, equal at the start, as the strategy does; by default not at all.

    Attributes:
        averages_gradients: whether replicas exchange anything between backward and an optimizer's step.
    """

    averages_gradients = False

    def before_forward(self) -> None:
        """Replicas begin a step."""

    def before_step(self) -> None:
        """All replicas have this step's gradients, which may be changed."""

    def after_step(self) -> None:
        """All optimizers have stepped."""


MakeRule: TypeAlias = Callable[[Replicas, Layout], Rule]
