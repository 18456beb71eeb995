"""Averages in which each rank counts by its samples: ``model.batch_weight``, and the ranks' exchange of it.

::

    forward     weight 2 (rank 0), 6 (rank 1) ── all-reduce of one number, under way while ...
    backward    ... the first gradients are computed ──► total 8: rank 0 divides by 4, rank 1 by 4/3 while packing
"""

from __future__ import annotations

import math
import numbers
from functools import cached_property
from typing import Any

import torch

from psengine.collectives.base import Collective
from psengine.errors import ArgumentTypeError, ConfigurationError
from psengine.tensors.leaves import is_real_scalar, to_float
from psengine.tensors.share import NOTHING, Share

WHAT = "batch weights (model.batch_weight is called on every rank, or on none)"


def checked_weight(value: Any) -> float | None:
    """Return what a user passed to ``batch_weight`` as a float; None stays None.

    Raises:
        ArgumentTypeError: no real number.
        ConfigurationError: negative, or not finite.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not (isinstance(value, numbers.Real) or is_real_scalar(value)):
        raise ArgumentTypeError(
            "batch_weight is one real number, such as how many samples this rank's batch has (expected a float or None,"
            f" got {type(value).__name__})"
        )
    weight = to_float(value)
    if not 0 <= weight < math.inf:
        raise ConfigurationError(
            f"batch_weight says how much this rank's gradients count (expected a finite number >= 0, got {weight})."
            " Fix: len(batch); 0 for a batch that is to have no say."
        )
    return weight


class TotalWeight:
    """The sum of the ranks' weights for one backward, on its way; every rank makes one.

    Args:
        weight: of this rank.
        collective: reduces on ``device``.
    """

    def __init__(self, weight: float, collective: Collective, device: torch.device) -> None:
        self.weight = weight
        self._total = torch.tensor([weight], dtype=torch.float64, device=device)
        self._work = collective.all_reduce(self._total, what=WHAT)

    @cached_property
    def value(self) -> float:
        """The sum; waits for it."""
        self._work.wait()
        return self._total.item()

    @property
    def share(self) -> Share:
        """The share of this rank: gradients are divided by total / weight, so that their sum is the average. A rank of
        weight 0 contributes nothing; where all weigh 0, the average is zeros.
        """
        total = self.value
        return Share(total / self.weight) if self.weight else NOTHING
