"""From what a user writes to a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from psengine.collectives.base import Collective
from psengine.collectives.c10d import C10dCollective
from psengine.collectives.shared_memory.collective import SharedMemoryCollective
from psengine.collectives.solo import SoloCollective
from psengine.errors import ConfigurationError
from psengine.kernels import native
from psengine.specification import Registry

COLLECTIVES: Registry[Collective] = Registry("collective", ("process_group", "device"))


def register_collective(name: str, factory: Callable[..., Collective]) -> None:
    """Let users write ``collective=name``, in this process, for what ``factory`` makes.

    Args:
        name: what stands before the colon, in PSENGINE_COLLECTIVE too.
        factory: called as ``factory(process_group, device)`` with a torch.distributed process group and the device of
            the tensors, by every rank of the group. Its other parameters are the options of ``name:option=value``.

    Raises:
        ConfigurationError: the name is taken, or is none.
    """
    COLLECTIVES.register(name, factory)


def _auto(process_group: Any, device: torch.device) -> Collective:
    """The fastest that works: shared memory where all ranks share this host and tensors are on the CPU, else c10d."""
    if device.type == "cpu" and process_group.size() > 1:
        native.say_if_missing()
        # Also where this rank lacks the extension: the others learn it when they connect.
        return SharedMemoryCollective(process_group, required=False)
    return _c10d(process_group, device)


def _c10d(process_group: Any, device: torch.device) -> Collective:
    return C10dCollective(process_group)


def _shared_memory(process_group: Any, device: torch.device) -> Collective:
    if device.type != "cpu":
        raise ConfigurationError(
            f"collective 'shared_memory' exchanges CPU tensors (expected a model on the CPU, got {device}). Use"
            " collective='auto' or 'c10d'."
        )
    return SharedMemoryCollective(process_group)


register_collective("auto", _auto)
register_collective("c10d", _c10d)
register_collective("shared_memory", _shared_memory)


def check_name(name: Any) -> None:
    """Raise ``ConfigurationError`` unless ``name`` names a collective, with options that it has."""
    if not isinstance(name, str):
        raise ConfigurationError(
            f"unknown collective (expected one of {sorted(COLLECTIVES)} or a psengine.Collective, got {name!r})"
        )
    COLLECTIVES.read(name)


def resolve_collective(specification: str | Collective, process_group: Any, device: torch.device) -> Collective:
    """Return the collective that ``specification`` names for tensors on ``device``, or the object itself.

    Without a group it is a collective of one.

    Raises:
        ConfigurationError: unknown name or option, or shared memory for tensors that are not on the CPU.
    """
    if isinstance(specification, Collective):
        return specification
    check_name(specification)
    if process_group is None:
        return SoloCollective()
    return COLLECTIVES.read(specification)(process_group, device)
