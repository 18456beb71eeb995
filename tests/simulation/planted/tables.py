"""Bugs of tables: of steps of rows, eviction, and what snapshots have of them."""

from __future__ import annotations

from typing import Any

from psengine.kernels.row_table import RowTable
from psengine.parameter_server.server.rules.rows import MergedRows, Rows
from simulation.planted import registry
from simulation.planted.registry import OF_TABLES, after, constant


def plant(name: str, *arguments: Any, **options: Any) -> Any:
    """As ``registry.plant``: it may be found where there are tables."""
    OF_TABLES.add(name)
    return registry.plant(name, *arguments, **options)


plant("a full table evicts nothing", Rows, "_make_room", constant(None))
plant("a snapshot of what has changed forgets the rest", Rows, "_changes", after(lambda changes: ((), changes[1])))


@plant("a snapshot forgets when rows were pushed", RowTable, "restore")
def _forget_stamps(restore, self, ids, rows, states, stamps):
    restore(self, ids, rows, states, stamps.zero_())


@plant("an overflow leaves out the rows of one worker", MergedRows, "use")
def _leave_one_out(use, self, given):
    use(self, [one for one in given if not one.overflow] or given)


@plant("rows are evicted before a step is known to have them", RowTable, "evict")
def _evict_any(evict, self, count, keep):
    return evict(self, count, keep[:0])
