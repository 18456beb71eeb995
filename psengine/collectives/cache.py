"""One collective for each process group and name, made once and kept as long as the group lives.

Whoever exchanges tensors within a group asks for the group's collective and keeps no other: operations of one group
then have one order, ranks meet once, and what a rank waits for is known in one place.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from psengine.collectives.base import Collective

# By process group, by name. Weak: a group that somebody destroyed must go, because its store holds the rendezvous port,
# and the next init_process_group() on that port would fail.
_collectives: weakref.WeakKeyDictionary[Any, dict[str, Collective]] = weakref.WeakKeyDictionary()
_lock = threading.RLock()  # to make one collective may ask for another


def collective_of(process_group: Any, name: str, make: Callable[[], Collective]) -> Collective:
    """Return the collective ``name`` of ``process_group``; make it where there is none, or none that still works.

    It is closed when the group is destroyed and nobody refers to it any more; a new group, of the same ranks too, gets
    a new one.

    Args:
        process_group: any object of torch.distributed that groups ranks.
        name: which of the group's collectives.
        make: makes it; what it returns must not keep the group alive.
    """
    with _lock:
        by_name = _collectives.get(process_group)
        if by_name is None:
            by_name = _collectives[process_group] = {}
            weakref.finalize(process_group, _close, by_name).atexit = False
        collective = by_name.get(name)
        if collective is None or collective.has_ended:
            collective = by_name[name] = make()
        return collective


def _close(by_name: dict[str, Collective]) -> None:
    for collective in by_name.values():
        collective.close()
