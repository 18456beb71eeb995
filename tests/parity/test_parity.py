"""A hundred steps under psengine's wrapper and under native DDP, side by side: every bit must be the same.

At world size 4 gloo's ring adds in an order that depends on where a gradient lies in its bucket, so equality there says
that the buckets are the same too.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _pytest.mark import ParameterSet
from parity.cases import CASES, CASES_BY_NAME, Case, Cell
from support.processes import RankResult, run_ranks_to_any_end

from psengine.kernels import native
from psengine.verify.differences import Difference, Tolerance
from psengine.verify.place import Place
from psengine.verify.side_by_side import train_side_by_side
from psengine.verify.target import check_target
from psengine.verify.training import Exchange
from psengine.verify.verdict import place_of

STEPS = 100
SEED = 20
WORLD_SIZES = (2, 4)
CELLS = tuple(Cell(optimizer, accumulate) for optimizer in ("sgd", "adamw") for accumulate in (False, True))
NATIVE, SYNC = Exchange("native", "native"), Exchange("sync", "sync")


def compare_cells(
    rank: int, world_size: int, case_name: str, cells: tuple[Cell, ...], candidate: str
) -> dict[Cell, dict[str, Any]]:
    """Compare ``candidate`` with native DDP in each cell; the body of a rank.

    After a cell that raises, the group's state is unknown: the cells that follow are left out.
    """
    # Over two ranks every transport adds the same two numbers; over more, gloo's order goes round a ring, and only over
    # gloo are the bits native's.
    in_memory = world_size == 2 and native.has_shared_memory() and candidate != "psengine over gloo"
    os.environ["PSENGINE_COLLECTIVE"] = "shared_memory" if in_memory else "c10d"
    case = CASES_BY_NAME[case_name]
    place = Place(rank=rank, world_size=world_size, device=torch.device("cpu"))
    found: dict[Cell, dict[str, Any]] = {}
    for cell in cells:
        # Of the reference's target, then of the candidate's.
        makers = iter((Case.target, FAULTS.get(candidate, Case.target)))
        try:
            found[cell] = train_side_by_side(
                lambda makers=makers, cell=cell: check_target(next(makers)(case, cell), case_name),
                case_name,
                SYNC if candidate.startswith("psengine") else NATIVE,
                NATIVE,
                place,
                steps=STEPS,
                seed=SEED,
                tolerance=Tolerance(),
            )
        except Exception:
            found[cell] = {"error": traceback.format_exc()}
            return found
    dist.barrier()
    return found


def one_ulp_off(case: Case, cell: Cell) -> tuple[Any, ...]:
    """In one step, one element of one gradient is the next float."""
    module, batch, loss, make_optimizer, options = case.target(cell)

    def optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        made, steps = make_optimizer(parameters), itertools.count()

        def spoil(*_: Any) -> None:
            if next(steps) == 56 and dist.get_rank() == dist.get_world_size() - 1:
                gradient = parameters[-1].grad
                gradient.view(-1)[-1:] = torch.nextafter(gradient.view(-1)[-1:], torch.tensor([math.inf]))

        made.register_step_pre_hook(spoil)
        return made

    return module, batch, loss, optimizer, options


def without_buffer_exchange(case: Case, cell: Cell) -> tuple[Any, ...]:
    return replace(case, options={**case.options, "forward_sync_buffers": False}).target(cell)


def with_other_buckets(case: Case, cell: Cell) -> tuple[Any, ...]:
    return replace(case, options={**case.options, "bucket_cap_mb": 25}).target(cell)


def reduces_every_micro_batch(case: Case, cell: Cell) -> tuple[Any, ...]:
    """Accumulates averages instead of averaging what accumulated."""
    module, batch, _, optimizer, options = case.target(cell)

    def loss(model: Any, micro_batches: Any) -> torch.Tensor:
        *local, last = micro_batches
        for one in local:
            (case.loss(model, one) / len(micro_batches)).backward()
        return case.loss(model, last) / len(micro_batches)

    return module, batch, loss, optimizer, options


FAULTS: dict[str, Callable[[Case, Cell], tuple[Any, ...]]] = {
    "one ulp off": one_ulp_off,
    "without buffer exchange": without_buffer_exchange,
    "with other buckets": with_other_buckets,
    "reduces every micro-batch": reduces_every_micro_batch,
}


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


def differences(case_name: str, world_size: int, cells: tuple[Cell, ...], cell: Cell, candidate: str) -> list[str]:
    """Each rank's first difference in the cell, "" where there is none; or why nothing was compared."""
    found = []
    for result in results(case_name, world_size, cells, candidate):
        findings = (result.value or {}).get(cell, {"error": result.error or f"ended early, {result.exit_code}"})
        if "error" in findings:
            found.append(findings["error"])
            continue
        assert findings["counts"]["gradient"] > 1
        assert len(findings["history"]) == STEPS + 1
        assert math.isfinite(findings["history"][-1]["reference_loss"])
        first = findings["first"] and Difference.from_json(findings["first"])
        found.append(f"{place_of(first)}: {first}" if first else "")
    return found


@pytest.mark.parametrize(("case_name", "world_size", "cell"), tuple(parameters_of_every_cell()))
def test_every_bit_equals_native_ddp(case_name: str, world_size: int, cell: Cell) -> None:
    cells = cells_run_together(CASES_BY_NAME[case_name], world_size, cell)
    found = differences(case_name, world_size, cells, cell, "psengine")
    assert found == [""] * world_size, "\n".join(found)


@pytest.mark.parametrize(
    ("candidate", "case_name", "world_size", "cell", "expected"),
    [
        ("native", "batch norm", 2, Cell("adamw", accumulate=True), ""),
        ("psengine over gloo", "transformer", 2, Cell("adamw", accumulate=True), ""),
        ("one ulp off", "mlp", 2, Cell("sgd", accumulate=False), "at step 56, gradient of 4.bias, rank 1"),
        ("without buffer exchange", "batch norm", 2, Cell("sgd", accumulate=False), "features.1.running_mean"),
        ("with other buckets", "mlp", 4, Cell("sgd", accumulate=False), "gradient"),
        ("reduces every micro-batch", "mlp", 2, Cell("adamw", accumulate=True), "gradient"),
    ],
)
def test_the_comparison_sees_small_faults(
    candidate: str, case_name: str, world_size: int, cell: Cell, expected: str
) -> None:
    found = differences(case_name, world_size, (cell,), cell, candidate)
    if expected:
        assert any(expected in difference for difference in found), found
    else:
        assert found == [""] * world_size, found
