"""Where a rank of a comparison stands, what it says, and how the ranks agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank's place.

    Attributes:
        rank, world_size: of the default process group.
        device: where models and batches are.
        note: told what begins now, for the message of whoever finds this rank silent.
        any_rank: whether the argument is true on any rank; all ranks ask at the same place.
    """

    rank: int
    world_size: int
    device: torch.device
    note: Callable[[str], None] = field(default=lambda text: None)
    any_rank: Callable[[bool], bool] = field(default=bool)
