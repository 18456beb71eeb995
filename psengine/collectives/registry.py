"""From what a user writes to a collective."""

from __future__ import annotations

from typing import Any

import torch

from psengine.collectives.base import Collective
from psengine.collectives.c10d import C10dCollective
from psengine.collectives.shared_memory.collective import SharedMemoryCollective
from psengine.collectives.solo import SoloCollective
from psengine.errors import ConfigurationError
from psengine.kernels import native

NAMES = ("auto", "c10d", "shared_memory")


def check_name(name: Any) -> None:
    """Raise ``ConfigurationError`` unless a collective has this name."""
    if name not in NAMES:
        raise ConfigurationError(f"unknown collective (expected one of {NAMES} or an object, got {name!r})")


def resolve_collective(specification: str | Collective, process_group: Any, device: torch.device) -> Collective:
    """Return the collective that ``specification`` names for tensors on ``device``, or the object itself.

    "auto" picks the fastest that works: shared memory where all ranks of ``process_group`` share this host and the
    tensors are on the CPU, else torch.distributed ("c10d"). Without a group it is a collective of one.

    Raises:
        ConfigurationError: an unknown name, or shared memory for tensors that are not on the CPU.
    """
    if isinstance(specification, Collective):
        return specification
    check_name(specification)
    if process_group is None:
        return SoloCollective()
    if specification == "shared_memory":
        if device.type != "cpu":
            raise ConfigurationError(
                f"collective 'shared_memory' exchanges CPU tensors (expected a model on the CPU, got {device}). Use"
                " collective='auto' or 'c10d'."
            )
        return SharedMemoryCollective(process_group)
    if specification == "auto" and device.type == "cpu" and process_group.size() > 1:
        native.say_if_missing()
        # Also where this rank lacks the extension: the others learn it when they connect.
        return SharedMemoryCollective(process_group, required=False)
    return C10dCollective(process_group)
