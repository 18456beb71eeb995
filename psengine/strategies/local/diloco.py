"""Strategy "diloco": local steps, and an outer step with the average of the replicas' differences.

Douillard et al. 2023 (https://arxiv.org/abs/2311.08105); a part of the model at a time, while inner steps go on:
Streaming DiLoCo, Douillard et al. 2025 (https://arxiv.org/abs/2501.18512). See ``local_steps.py`` for a round.
"""

from __future__ import annotations

from typing import Any

from psengine.codecs.base import Codec
from psengine.codecs.registry import resolve_codec
from psengine.strategies.local.fragments import OuterStep
from psengine.strategies.local.local_steps import LocalSteps
from psengine.strategies.local.schedule import Schedule, checked_number


class Diloco(LocalSteps):
    """Step locally; every ``every`` steps an outer Nesterov step with the average of the replicas' differences.

    Costs a copy of the parameters, the outer momentum, and with ``overlap`` a copy of what travels. Buffers are
    averaged and replicas weighed as under "local".

    Args:
        every: local steps of a round.
        fragments: parts of the model that are exchanged in turn, each once in a round.
        overlap: local steps that are taken while a part travels.
        keep: with ``overlap``, the share of its own parameters that a replica keeps when a part arrives.
        outer_lr: learning rate of the outer step.
        outer_momentum: its Nesterov momentum.
        compress: the codec, or its name, of the differences (outer gradients).

    Raises:
        ConfigurationError: an option is out of its range.
    """

    name = "diloco"

    def __init__(
        self,
        every: int = 100,
        *,
        fragments: int = 1,
        overlap: int = 0,
        keep: float = 0.5,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        compress: str | Codec | None = None,
    ) -> None:
        outer_lr, outer_momentum = checked_outer(outer_lr, outer_momentum)
        keep = checked_number("keep", keep, lambda value: 0 <= value < 1, "a share: 0 <= keep < 1")
        schedule = Schedule(every=every, fragments=fragments, overlap=overlap)
        outer = OuterStep(learning_rate=outer_lr, momentum=outer_momentum, keep=keep if overlap else 0.0)
        codec = resolve_codec(compress)
        self._options = {"every": every, "fragments": fragments, "overlap": overlap, "keep": keep, "compress": codec}
        self._options |= {"outer_lr": outer_lr, "outer_momentum": outer_momentum}
        self._set_up(schedule, codec, outer)


def checked_outer(learning_rate: Any, momentum: Any) -> tuple[float, float]:
    """The options of an outer step, checked."""
    return (
        checked_number("outer_lr", learning_rate, lambda value: 0 < value < 1e6, "a learning rate: 0 < outer_lr < 1e6"),
        checked_number("outer_momentum", momentum, lambda value: 0 <= value < 1, "0 <= outer_momentum < 1"),
    )
