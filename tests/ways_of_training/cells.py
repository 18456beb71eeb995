"""The table's cells as pytest's parameters."""

from __future__ import annotations

import pytest
import torch
from _pytest.mark import ParameterSet
from ways_of_training.ranks import Cell, Ranks
from ways_of_training.rows import ROWS
from ways_of_training.table import SYNC, WITH_THREE_WORKERS, oracle_of

from psengine.parameter_server.server.coordinator import coordinators
from psengine.parameter_server.server.shard import shard

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def hold_many_jobs() -> None:
    """In a server's process: an asynchronous job stays when its worker has left, and there is one for each cell."""
    shard.MAX_JOBS = coordinators.MAX_JOBS = 4096


def cells_of(columns: tuple[str, ...]) -> list[ParameterSet]:
    """Every cell that is run. In the quick suite a row takes one of sync's columns, and every fourth three workers."""
    cells = []
    for index, row in enumerate(ROWS.values()):
        in_turn = (tuple(SYNC)[index % len(SYNC)], *(WITH_THREE_WORKERS if index % 4 == 0 else ()))
        for column in columns:
            if not row.expects(column).left_out:
                is_slow = row.is_slow or (column in (*SYNC, *WITH_THREE_WORKERS) and column not in in_turn)
                marks = [pytest.mark.slow] if is_slow else []
                if row.oldest_torch > TORCH:
                    marks.append(pytest.mark.skip(reason="this version's native DDP cannot train so"))
                cells.append(pytest.param(row.name, column, id=f"{row.name}-{column}", marks=marks))
    return cells


def check(ranks: Ranks, name: str, column: str) -> None:
    row = ROWS[name]
    wrong = ranks.run(Cell(row.program, column, row.expects(column), row.expects(oracle_of(column))))
    if wrong:
        pytest.fail(f"{name} ({row.subject}.py), {column}: {wrong}", pytrace=False)
