"""Averages in which each rank counts by its samples: ``model.batch_weight``, and the ranks' exchange of it.

::

    forward     weight 2 (rank 0), 6 (rank 1) ── all-reduce of one number, under way while ...
    backward    ... the first gradients are computed ──► total 8: rank 0 divides by 4, rank 1 by 4/3 while packing
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch

from psengine.collectives.base import Collective, Work
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


class BatchWeights:
    """The sum of the ranks' weights for one backward. ``collective`` reduces on ``device``."""

    def __init__(self, collective: Collective, device: torch.device) -> None:
        self._collective = collective
        self._device = device
        self._weight: float | None = None
        self._total: torch.Tensor | None = None
        self._work: Work | None = None

    @property
    def weight(self) -> float | None:
        """The weight of this rank in the coming backward; None where all ranks count alike."""
        return self._weight

    def exchange(self, weight: float | None) -> None:
        """Begin to sum the ranks' weights; before a backward all ranks call it with a weight, or all with None."""
        if self._work is not None:
            self._work.wait()  # its forward had no backward
            self._work = None
        self._weight, self._total = weight, None
        if weight is not None:
            self._total = torch.tensor([weight], dtype=torch.float64, device=self._device)
            self._work = self._collective.all_reduce(self._total, what=WHAT)

    def share(self) -> Share:
        """Return this rank's share: gradients are divided by total / weight, so that the sum over ranks is the average.

        A rank of weight 0 contributes nothing; where all weigh 0, the average is zeros.
        """
        assert self._total is not None, "asked without weights"
        if self._work is not None:
            self._work.wait()
            self._work = None
        return Share(self._total.item() / self._weight) if self._weight else NOTHING
