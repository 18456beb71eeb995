"""Which fragments of a model are exchanged after which local step. Pure.

``every=6, fragments=3, overlap=1``: each fragment is exchanged once in a round of six steps, in turn::

    step        1   2   3   4   5   6   7   8
    fragment 0      ├───┤                   ├───    leaves after step 2, arrives after step 3
    fragment 1              ├───┤
    fragment 2                      ├───┤
    buffers                         │
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from psengine.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When replicas agree; steps are counted from 1.

    Attributes:
        every: local steps of a round, in which each fragment is exchanged once.
        fragments: number of parts of the model that are exchanged in turn.
        overlap: local steps that are taken while a fragment travels.

    Raises:
        ConfigurationError: a number is out of its range.
    """

    every: int
    fragments: int = 1
    overlap: int = 0

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("fragments", 1), ("overlap", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigurationError(f"{name} is a number (expected an integer of at least {least}, got {value!r})")
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

    def leaving(self, step: int) -> list[int]:
        """The fragments that leave after ``step``."""
        places = [(index + 1) * self.every // self.fragments % self.every for index in range(self.fragments)]
        return [index for index, place in enumerate(places) if place == step % self.every]

    def ends_round(self, step: int) -> bool:
        """Whether ``step`` is the last one of a round."""
        return step % self.every == 0


def checked_number(name: str, value: Any, is_in_range: Callable[[float], bool], expected: str) -> float:
    """Return the option ``name`` as a float.

    Raises:
        ConfigurationError: it is no number, or not in its range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_in_range(value):
        raise ConfigurationError(f"{name} (expected {expected}, got {value!r})")
    return float(value)
