"""From what a user writes to a collective."""

from __future__ import annotations

from typing import Any

from psengine.collectives.base import Collective
from psengine.collectives.c10d import C10dCollective
from psengine.collectives.solo import SoloCollective
from psengine.errors import ConfigurationError

NAMES = ("auto", "c10d")


def resolve_collective(specification: str | Collective, process_group: Any) -> Collective:
    """Return the collective that ``specification`` names ("auto", "c10d") for ``process_group``, or the object itself.

    "auto" picks the fastest that works here: torch.distributed, or, without a group, a collective of one.

    Raises:
        ConfigurationError: an unknown name.
    """
    if isinstance(specification, Collective):
        return specification
    if specification not in NAMES:
        raise ConfigurationError(f"unknown collective (expected one of {NAMES} or an object, got {specification!r})")
    return SoloCollective() if process_group is None else C10dCollective(process_group)
