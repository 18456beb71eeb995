"""The table's cells as pytest's parameters."""

from __future__ import annotations

import pytest
import torch
from _pytest.mark import ParameterSet
from ways_of_training.ranks import Cell, Ranks
from ways_of_training.rows import ROWS
from ways_of_training.table import oracle_of

from psengine.parameter_server.server.core import shard_jobs

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def hold_many_jobs() -> None:
    """In a server's process: an asynchronous job stays when its worker has left, and there is one for each cell."""
    shard_jobs.MAX_JOBS = 4096


def cells_of(columns: tuple[str, ...]) -> list[ParameterSet]:
    """Every cell that is run. A row that is not slow takes one of sync's transports in the quick suite, by turns."""
    cells = []
    for index, row in enumerate(ROWS.values()):
        other_transport = ("c10d", "shared_memory")[index % 2]
        for column in columns:
            if not row.expects(column).left_out:
                is_slow = row.is_slow or column == other_transport
                marks = [pytest.mark.slow] if is_slow else []
                if row.oldest_torch > TORCH:
                    marks.append(pytest.mark.skip(reason="this version's native DDP cannot train so"))
                cells.append(pytest.param(row.name, column, id=f"{row.name}-{column}", marks=marks))
    return cells


def check(ranks: Ranks, name: str, column: str) -> None:
    row = ROWS[name]
    wrong = ranks.run(Cell(row.program, column, row.expects(column), row.expects(oracle_of(column))))
    if wrong is not None:
        pytest.fail(f"{name} ({row.subject}.py), {column}: {wrong}", pytrace=False)
