"""One collective for each process group, for those who are called with a group and keep nothing between calls.

Making one costs a store write and a look at the group's timeout; metrics and batch normalisation, which run in every
step, find theirs here instead.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist

from psengine.collectives.base import Collective
from psengine.collectives.c10d import C10dCollective
from psengine.collectives.registry import check_name
from psengine.collectives.shared_memory.collective import SharedMemoryCollective
from psengine.environment.context import default_collective
from psengine.errors import ArgumentTypeError

_collectives: weakref.WeakKeyDictionary[Any, Collective] = weakref.WeakKeyDictionary()


def collective_for(process_group: Any = None) -> Collective | None:
    """Return the collective of ``process_group`` (None: the default group), made once; None where nobody else is in it.

    Raises:
        ArgumentTypeError: not a process group, such as the marker ``new_group`` returns to ranks outside the group.
    """
    if process_group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        process_group = dist.group.WORLD
    if not isinstance(process_group, dist.ProcessGroup):
        raise ArgumentTypeError(
            "process_group is not a process group this rank belongs to (expected torch.distributed.ProcessGroup or"
            f" None, got {process_group!r}). Call it only on the ranks given to new_group()."
        )
    if process_group.size() == 1:
        return None
    collective = _collectives.get(process_group)
    if collective is None:
        _collectives[process_group] = collective = _make(process_group)
    return collective


def _make(process_group: dist.ProcessGroup) -> Collective:
    over_torch = C10dCollective(process_group)
    # The cache must not keep a destroyed group alive: its store would go on holding the rendezvous port, and the next
    # init_process_group() on that port would fail.
    over_torch.process_group = weakref.proxy(process_group)
    name = default_collective()
    check_name(name)
    if name == "c10d":
        return over_torch
    return SharedMemoryCollective(over_torch, required=name == "shared_memory")
