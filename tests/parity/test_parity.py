"""A hundred steps under psengine's wrapper and under native DDP, side by side: every bit must be the same.

At world size 4 gloo's ring adds in an order that depends on where a gradient lies in its bucket, so equality there says
that the buckets are the same too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet
from parity.comparison import CELLS, STEPS, Cell, Outcome, compare_cells
from parity.models import CASES, CASES_BY_NAME, Case
from support.processes import RankResult, run_ranks_to_any_end

WORLD_SIZES = (2, 4)


def cells_of(case: Case) -> tuple[Cell, ...]:
    return tuple(cell for cell in CELLS if case.accumulates or not cell.accumulate)


def quick_cells(case: Case, world_size: int) -> tuple[Cell, ...]:
    """The cells that are not ``slow``: core cases meet both optimizers, one with accumulation, one without."""
    cells = cells_of(case)
    if case.core:
        by_turns = (Cell("sgd", accumulate=True), Cell("adamw", accumulate=False))
        return by_turns if world_size == 2 else (by_turns[CASES.index(case) % 2],)
    return (cells[CASES.index(case) % len(cells)],) if world_size == 2 else ()


def cells_run_together(case: Case, world_size: int, cell: Cell) -> tuple[Cell, ...]:
    """Cells that share one start of the ranks: the quick ones, or the others."""
    quick = quick_cells(case, world_size)
    return quick if cell in quick else tuple(other for other in cells_of(case) if other not in quick)


def parameters_of_every_cell() -> Iterator[ParameterSet]:
    for case, world_size in itertools.product(CASES, WORLD_SIZES):
        for cell in cells_of(case):
            name = case.name.replace(", ", "+").replace(" ", "_")
            marks = () if cell in quick_cells(case, world_size) else pytest.mark.slow
            yield pytest.param(case.name, world_size, cell, id=f"{name}-{world_size}-{cell}", marks=marks)


@functools.cache
def results(case_name: str, world_size: int, cells: tuple[Cell, ...], candidate: str) -> list[RankResult]:
    """Every cell of a case at a world size, trained in one start of the ranks."""
    return run_ranks_to_any_end(compare_cells, world_size, case_name, cells, candidate, deadline_s=120)


def outcomes(
    case_name: str, world_size: int, cells: tuple[Cell, ...], cell: Cell, candidate: str
) -> list[Outcome | str]:
    """Each rank's outcome of the cell; where there is none, the reason."""
    found: list[Outcome | str] = []
    for result in results(case_name, world_size, cells, candidate):
        reached: dict[Cell, Outcome] = result.value or {}
        reason = (
            result.error or f"ended before this cell; exit code {result.exit_code}, finished {list(map(str, reached))}"
        )
        found.append(reached.get(cell, reason))
    return found


@pytest.mark.parametrize(("case_name", "world_size", "cell"), tuple(parameters_of_every_cell()))
def test_every_bit_equals_native_ddp(case_name: str, world_size: int, cell: Cell) -> None:
    cells = cells_run_together(CASES_BY_NAME[case_name], world_size, cell)
    failures = []
    for rank, outcome in enumerate(outcomes(case_name, world_size, cells, cell, "psengine")):
        where = f"{case_name}, {cell}, rank {rank} of {world_size}"
        if isinstance(outcome, str):
            failures.append(f"{where}: {outcome}")
        elif outcome.error or outcome.difference:
            failures.append(f"{where}: {outcome.error or outcome.difference}")
        else:
            assert outcome.tensors_compared > STEPS, f"{where}: compared only {outcome.tensors_compared} tensors"
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)


@pytest.mark.parametrize(
    ("candidate", "case_name", "world_size", "cell", "expected"),
    [
        ("native", "batch norm", 2, Cell("adamw", accumulate=True), None),
        ("psengine over gloo", "transformer", 2, Cell("adamw", accumulate=True), None),
        ("one ulp off", "mlp", 2, Cell("sgd", accumulate=False), "step 56, gradient, 4.bias: 1 of 10 elements"),
        ("without buffer exchange", "batch norm", 2, Cell("sgd", accumulate=False), "features.1.running_mean"),
        ("with other buckets", "mlp", 4, Cell("sgd", accumulate=False), "gradient"),
        ("reduces every micro-batch", "mlp", 2, Cell("adamw", accumulate=True), "gradient"),
    ],
)
def test_the_comparison_sees_small_faults(
    candidate: str, case_name: str, world_size: int, cell: Cell, expected: str | None
) -> None:
    differences = []
    for outcome in outcomes(case_name, world_size, (cell,), cell, candidate):
        assert isinstance(outcome, Outcome), outcome
        assert outcome.error is None, outcome.error
        differences.append(outcome.difference)
    if expected is None:
        assert differences == [None] * world_size
    else:
        assert any(difference and expected in difference for difference in differences), differences
