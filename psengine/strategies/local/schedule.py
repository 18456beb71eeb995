"""Options of rounds, and which part of a model is exchanged after which local step. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from psengine.errors import ConfigurationError, ProtocolError
from psengine.protocol.bodies import convert


class RoundOptions(TypedDict, total=False):
    """What the options of rounds may be."""

    every: Annotated[int, Meta(ge=1)]
    fragments: Annotated[int, Meta(ge=1)]
    overlap: Annotated[int, Meta(ge=0)]
    keep: Annotated[float, Meta(ge=0, lt=1)]
    outer_lr: Annotated[float, Meta(gt=0, lt=1e6)]
    outer_momentum: Annotated[float, Meta(ge=0, lt=1)]


def checked_options(strategy: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of rounds, as the types that they have.

    Raises:
        ConfigurationError: one is out of its range.
    """
    try:
        return dict(convert(options, RoundOptions, f"strategy {strategy!r}"))
    except ProtocolError as error:
        raise ConfigurationError(f"{error}. Fix: give such a value, or leave the option out") from None


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When replicas agree; steps are counted from 1.

    Attributes:
        every: local steps of a round, in which each part is exchanged once.
        fragments: number of parts of the model that are exchanged in turn.
        overlap: local steps that are taken while a part travels.

    Raises:
        ConfigurationError: the numbers do not fit together.
    """

    every: int
    fragments: int = 1
    overlap: int = 0

    def __post_init__(self) -> None:
        if self.fragments > self.every:
            raise ConfigurationError(
                f"a round of every={self.every} steps exchanges one fragment after a step (expected at most"
                f" fragments={self.every}, got {self.fragments}). Fix: fewer fragments, or a longer round."
            )
        if self.overlap >= self.every:
            raise ConfigurationError(
                "a fragment arrives before it leaves again (expected an overlap of fewer than"
                f" every={self.every} steps, got {self.overlap}). Fix: less overlap, or a longer round."
            )

    def leaving(self, step: int) -> int | None:
        """The part that leaves after ``step``."""
        places = [(index + 1) * self.every // self.fragments % self.every for index in range(self.fragments)]
        return places.index(step % self.every) if step % self.every in places else None
