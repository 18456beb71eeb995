"""The table's cells as pytest's parameters."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet
from ways_of_training.ranks import Cell, Ranks
from ways_of_training.rows import ROWS
from ways_of_training.table import oracle_of


def cells_of(columns: tuple[str, ...]) -> list[ParameterSet]:
    return [
        pytest.param(row.name, column, id=f"{row.name}-{column}", marks=pytest.mark.slow if row.is_slow else ())
        for row in ROWS.values()
        for column in columns
        if not row.expects(column).left_out
    ]


def check(ranks: Ranks, name: str, column: str) -> None:
    row = ROWS[name]
    wrong = ranks.run(Cell(row.program, column, row.expects(column), row.expects(oracle_of(column))))
    if wrong is not None:
        pytest.fail(f"{name} ({row.subject}.py), {column}: {wrong}", pytrace=False)
