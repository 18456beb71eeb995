"""A rank of a comparison: its number and device, its progress notes, and a vote of all ranks."""

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
        note: records what this rank does now; the launcher's error shows it if the rank dies or is late.
        any_rank: whether the argument is true on any rank; a collective call.
    """

    rank: int
    world_size: int
    device: torch.device
    note: Callable[[str], None] = field(default=lambda text: None)
    any_rank: Callable[[bool], bool] = field(default=bool)
