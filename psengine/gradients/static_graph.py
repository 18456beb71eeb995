"""A graph that the user promises not to change: its first iteration is counted, every later one must be the same."""

from __future__ import annotations

import logging
from collections.abc import Sequence

logger = logging.getLogger(__name__)

UNEXPECTED = -1


class StaticGraph:
    """How often each parameter's hook fires in a backward.

    Args:
        names: of the parameters, by index, for the log.

    Attributes:
        is_promised: whether the user promised.
        is_known: whether the first iteration was counted.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.is_promised = False
        self.is_known = False
        self._names = names
        self._counts = [0] * len(names)
        self._left: list[int] = []

    @property
    def is_first_iteration(self) -> bool:
        """Whether the iteration that is being counted, or comes next, is the first."""
        return self.is_promised and not self.is_known

    def begin(self) -> None:
        """A backward is expected."""
        if not self.is_known:
            self._counts = [0] * len(self._names)  # an earlier attempt may have raised half-way
        self._left = list(self._counts)

    def count(self, index: int) -> None:
        """A hook of the first iteration fired."""
        self._counts[index] += 1

    def expect(self, index: int) -> int:
        """A hook of a later iteration fired: return how often this one is still to fire, or ``UNEXPECTED``."""
        self._left[index] -= 1
        return max(self._left[index], UNEXPECTED)

    def learn(self) -> list[int]:
        """The first iteration is over: return the indices of parameters that it did not use, and never will."""
        self.is_known = True
        unused = [index for index, count in enumerate(self._counts) if count == 0]
        if unused:
            logger.info(
                "Parameter(s) %s is(are) unused during first iteration. Since static_graph=True is enabled for DDP,"
                " we expect this set of unused parameters to remain consistent on this rank throughout the training.",
                ", ".join(f"{{{self._names[i]}, {i}}}" for i in unused),
            )
        return unused
