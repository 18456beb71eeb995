"""Options of rounds, and which part of a model is exchanged after which local step. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta
from typing_extensions import Self

from psengine.errors import ConfigurationError, ProtocolError
from psengine.protocol.bodies import convert


@dataclass(frozen=True, kw_only=True)
class RoundOptions:
    """When replicas synchronise, and by which outer step; steps are counted from 1.

    Attributes:
        every: local steps of a round, in which each part is exchanged once.
        fragments: number of parts of the model that are exchanged in turn.
        overlap: local steps that are taken while a part travels.
        keep: with ``overlap``, the share of its own parameters that a replica keeps when a part arrives; the rest is
            what all agreed on (alpha in https://arxiv.org/abs/2501.18512).
        outer_lr: learning rate of the outer step; 1 without momentum averages parameters.
        outer_momentum: its Nesterov momentum; 0 is plain SGD.
    """

    every: Annotated[int, Meta(ge=1)]
    fragments: Annotated[int, Meta(ge=1)] = 1
    overlap: Annotated[int, Meta(ge=0)] = 0
    keep: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    outer_lr: Annotated[float, Meta(gt=0, lt=1e6)] = 1.0
    outer_momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.0

    def __post_init__(self) -> None:
        """Check what belongs together."""
        if self.fragments > self.every:
            raise ValueError(
                f"a step exchanges one fragment (expected at most fragments={self.every}, got {self.fragments})"
            )
        if self.overlap >= self.every:
            raise ValueError(
                f"a fragment arrives before it leaves again (expected overlap < every={self.every}, got {self.overlap})"
            )

    @classmethod
    def checked(cls, strategy: str, **options: Any) -> Self:
        """The options of ``strategy``.

        Raises:
            ConfigurationError: one is out of its range, or they do not fit together.
        """
        try:
            made: Self = convert(options, cls, f"strategy {strategy!r}")
        except ProtocolError as error:
            raise ConfigurationError(f"{error}. Fix: give other values, or leave the options out") from None
        return made

    def leaving(self, step: int) -> int | None:
        """The part that leaves after ``step``."""
        places = [(index + 1) * self.every // self.fragments % self.every for index in range(self.fragments)]
        return places.index(step % self.every) if step % self.every in places else None
