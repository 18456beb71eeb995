"""From what a user writes to the one collective of a process group.

All who exchange tensors in a group get the group's one collective: its operations then have one order, ranks meet once,
and one place knows what a rank waits for.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from psengine.collectives.base import Collective
from psengine.collectives.c10d import C10dCollective
from psengine.collectives.hierarchical import HierarchicalCollective
from psengine.collectives.shared_memory.collective import SharedMemoryCollective
from psengine.collectives.solo import SoloCollective
from psengine.environment.variables import default_collective
from psengine.errors import ArgumentTypeError, ConfigurationError
from psengine.kernels import native
from psengine.specification import Registry

COLLECTIVES: Registry[Collective] = Registry("collective", ("process_group", "device"))

CPU = torch.device("cpu")
Made = TypeVar("Made", bound=Collective)

# By process group, by name. Weak: the store of a destroyed group holds the rendezvous port, on which the next
# init_process_group() would fail.
_collectives: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
_lock = threading.RLock()  # making one collective may ask for another


def register_collective(name: str, factory: Callable[..., Collective]) -> None:
    """Let users write ``collective=name``, in this process, for what ``factory`` makes.

    Args:
        name: what stands before the colon, in PSENGINE_COLLECTIVE too.
        factory: called as ``factory(process_group, device)`` with a torch.distributed process group and the device of
            the tensors, once for each group and type of device, by every rank of the group. The result serves all
            exchanges in that group, and must not keep the group alive. Other parameters are the options of
            ``name:option=value``.

    Raises:
        ConfigurationError: the name is taken, or is none.
    """
    COLLECTIVES.register(name, factory)


def _auto(process_group: Any, device: torch.device) -> Collective:
    """The fastest that works: shared memory where all ranks share this host and tensors are on the CPU, else c10d."""
    native.say_if_missing()
    c10d = _c10d(process_group, device)
    if device.type != "cpu" or c10d.world_size == 1:
        return c10d
    # Also where this rank lacks the extension: the others learn it when they connect.
    return _shared_memory_of(process_group, is_required=False)


def _c10d(process_group: Any, device: torch.device) -> C10dCollective:
    return collective_of(process_group, "c10d", lambda: C10dCollective(process_group))


def _shared_memory(process_group: Any, device: torch.device) -> Collective:
    if device.type != "cpu":
        raise ConfigurationError(
            f"collective 'shared_memory' exchanges CPU tensors (got {device}). Fix: collective='auto' or 'c10d'."
        )
    return _shared_memory_of(process_group, is_required=True)


def _shared_memory_of(process_group: Any, *, is_required: bool) -> SharedMemoryCollective:
    """One for "auto" and "shared_memory": ranks connect once."""
    inner = _c10d(process_group, CPU)
    shared = collective_of(process_group, "shared memory", lambda: SharedMemoryCollective(inner, is_required=False))
    shared.is_required |= is_required
    return shared


def _hierarchical(process_group: Any, device: torch.device) -> Collective:
    """Ranks of one host add in shared memory, hosts over torch.distributed; CUDA tensors by nccl, as torch does."""
    c10d = _c10d(process_group, device)
    return c10d if device.type != "cpu" or c10d.world_size == 1 else HierarchicalCollective(c10d)


register_collective("auto", _auto)
register_collective("c10d", _c10d)
register_collective("shared_memory", _shared_memory)
register_collective("hierarchical", _hierarchical)


def collective_of(process_group: Any, name: str, make: Callable[[], Made]) -> Made:
    """Return the collective ``name`` of ``process_group``; ``make`` it where there is none that still works.

    It is closed when the group is destroyed and no longer referred to. ``make``'s result must not keep the group alive.
    """
    with _lock:
        by_name = _collectives.get(process_group)
        if by_name is None:
            by_name = _collectives[process_group] = {}
            weakref.finalize(process_group, _close, by_name).atexit = False
        collective = by_name.get(name)
        if collective is None or collective.has_ended:
            collective = by_name[name] = make()
        made: Made = collective
        return made


def _close(by_name: dict[str, Collective]) -> None:
    for collective in by_name.values():
        collective.close()


def collective_for(
    process_group: Any, specification: str | Collective | None = None, device: torch.device = CPU
) -> Collective:
    """Return the one collective of ``process_group`` that ``specification`` names; made at the first call.

    Args:
        process_group: None for a collective of one.
        specification: None takes PSENGINE_COLLECTIVE, else "auto"; a collective is returned as it is.
        device: where most of the tensors are. Tensors on other devices are exchanged too, over torch.distributed.

    Raises:
        ArgumentTypeError: not a process group, such as the marker ``new_group`` returns to ranks outside the group.
        ConfigurationError: unknown name or option, or shared memory for tensors that are not on the CPU.
    """
    if isinstance(specification, Collective):
        return specification
    specification = default_collective() if specification is None else specification
    if not isinstance(specification, str):
        raise ConfigurationError(
            f"no collective (expected one of {sorted(COLLECTIVES)} or a psengine.Collective, got {specification!r})"
        )
    if process_group is None:
        COLLECTIVES.read(specification)
        return SoloCollective()
    if not isinstance(process_group, dist.ProcessGroup):
        raise ArgumentTypeError(
            "process_group is not a process group this rank belongs to (expected torch.distributed.ProcessGroup or"
            f" None, got {process_group!r}). Call it only on the ranks given to new_group()."
        )
    name = f"{specification} on {device.type}"
    return collective_of(process_group, name, lambda: COLLECTIVES.read(specification)(process_group, device))


def check_choice(process_group: Any, specification: str | Collective) -> None:
    """See that all ranks that wrap a model choose the same collective: over different ones they would never meet.

    Raises:
        ReplicaMismatchError: another rank has chosen another one.
    """
    if process_group is not None and isinstance(specification, str):
        _c10d(process_group, CPU).check_choice("collective", specification)


def default_group() -> Any:
    """The default process group; None where there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
