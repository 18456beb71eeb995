"""Training under psengine's wrapper and under native DDP, side by side: every bit must be the same.

With three and four ranks gloo's ring adds in an order that depends on where a gradient lies in its bucket, so equality
there says that the buckets are the same too. With three, dividing differs from multiplying by the reciprocal.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _pytest.mark import ParameterSet
from parity.cases import CASES, CASES_BY_NAME, SYNC_BUFFERS, Case, Cell
from support.processes import RanksFailedError, run_ranks_to_any_end

from psengine.kernels import native
from psengine.verify.differences import Tolerance
from psengine.verify.ranks import Place
from psengine.verify.side_by_side import Findings, train_side_by_side
from psengine.verify.target import check_target
from psengine.verify.training import Exchange

# Buckets are laid out anew after the first step; the experts that ``routed`` chooses repeat every 84 batches, and the
# first 16 hold every kind of choice. The slow cells go on for longer, to where weights have moved.
QUICK_STEPS, SLOW_STEPS = 16, 100
SEED = 20
WORLD_SIZES = (2, 3, 4)
CELLS = tuple(Cell(optimizer, accumulate) for optimizer in ("sgd", "adamw") for accumulate in (False, True))
NATIVE, SYNC = Exchange("native", "native"), Exchange("sync", "sync")


@dataclass(frozen=True)
class Trial:
    """A cell of a case, with ``candidate`` in psengine's place: one of ``FAULTS``, or another way to train right."""

    case_name: str
    cell: Cell
    candidate: str = "psengine"


def compare_trials(rank: int, world_size: int, trials: tuple[Trial, ...], steps: int) -> dict[Trial, Findings | str]:
    """Compare each trial's candidate with native DDP; the body of a rank.

    After a trial that raises, the group's state is unknown: the trials that follow are left out.
    """
    found: dict[Trial, Findings | str] = {}
    for trial in trials:
        try:
            found[trial] = compare_trial(
                Place(rank=rank, world_size=world_size, device=torch.device("cpu")), trial, steps
            )
        except Exception:
            found[trial] = traceback.format_exc()
            return found
    dist.barrier()
    return found


def compare_trial(place: Place, trial: Trial, steps: int) -> Findings:
    in_memory = native.has_shared_memory() and trial.candidate != "psengine over gloo"
    os.environ["PSENGINE_COLLECTIVE"] = "shared_memory" if in_memory else "c10d"
    case = CASES_BY_NAME[trial.case_name]
    # Of the reference's target, then of the candidate's.
    makers = iter((Case.target, FAULTS.get(trial.candidate, Case.target)))
    return train_side_by_side(
        lambda: check_target(next(makers)(case, trial.cell), trial.case_name),
        trial.case_name,
        SYNC if trial.candidate.startswith("psengine") else NATIVE,
        NATIVE,
        place,
        steps=steps,
        seed=SEED,
        tolerance=Tolerance(),
    )


def one_ulp_off(case: Case, cell: Cell) -> tuple[Any, ...]:
    """In one step, one element of one gradient is the next float."""
    module, batch, loss, make_optimizer, options = case.target(cell)

    def optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        made, steps = make_optimizer(parameters), itertools.count()

        def spoil(*_: Any) -> None:
            if next(steps) == 9 and dist.get_rank() == dist.get_world_size() - 1:
                gradient = parameters[-1].grad
                gradient.view(-1)[-1:] = torch.nextafter(gradient.view(-1)[-1:], torch.tensor([math.inf]))

        made.register_step_pre_hook(spoil)
        return made

    return module, batch, loss, optimizer, options


def without_buffer_exchange(case: Case, cell: Cell) -> tuple[Any, ...]:
    return replace(case, options={**case.options, SYNC_BUFFERS: False}).target(cell)


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
# What is compared with native DDP besides psengine, and what the first difference should hold ("": there is none).
CONTROLS = (
    (2, Trial("batch norm", Cell("adamw", accumulate=True), "native"), ""),
    (2, Trial("transformer", Cell("adamw", accumulate=True), "psengine over gloo"), ""),
    (2, Trial("mlp", Cell("sgd", accumulate=False), "one ulp off"), "at step 9, gradient of 4.bias, rank 1"),
    (2, Trial("batch norm", Cell("sgd", accumulate=False), "without buffer exchange"), "features.1.running_mean"),
    (3, Trial("mlp", Cell("sgd", accumulate=False), "with other buckets"), "gradient"),
    (3, Trial("transformer", Cell("adamw", accumulate=True), "psengine over gloo"), ""),
    (2, Trial("mlp", Cell("adamw", accumulate=True), "reduces every micro-batch"), "gradient"),
)


def cells_of(case: Case) -> tuple[Cell, ...]:
    return tuple(cell for cell in CELLS if case.accumulates or not cell.accumulate)


def quick_cells(case: Case, world_size: int) -> tuple[Cell, ...]:
    """The cells that are not ``slow``: core cases meet both optimizers, one with accumulation, one without.

    With three ranks also the cases whose gradients stay views, which are divided; with four ranks none.
    """
    cells = cells_of(case)
    if case.core:
        by_turns = (Cell("sgd", accumulate=True), Cell("adamw", accumulate=False))
        return {2: by_turns, 3: (by_turns[CASES.index(case) % 2],)}.get(world_size, ())
    is_quick = world_size == 2 or (world_size == 3 and not case.set_to_none)
    return (cells[CASES.index(case) % len(cells)],) if is_quick else ()


def parameters_of_every_cell() -> Iterator[ParameterSet]:
    for case, world_size in itertools.product(CASES, WORLD_SIZES):
        for cell in cells_of(case):
            name = case.name.replace(", ", "+").replace(" ", "_")
            marks = () if cell in quick_cells(case, world_size) else pytest.mark.slow
            yield pytest.param(Trial(case.name, cell), world_size, id=f"{name}-{world_size}-{cell}", marks=marks)


@functools.cache
def quick_results(world_size: int) -> list[dict[Trial, Findings | str]]:
    """Every quick trial at a world size, in one start of the ranks."""
    trials = [Trial(case.name, cell) for case in CASES for cell in quick_cells(case, world_size)]
    trials += [trial for size, trial, _ in CONTROLS if size == world_size]
    return results(world_size, tuple(trials), QUICK_STEPS)


@functools.cache
def slow_results(world_size: int, case_name: str) -> list[dict[Trial, Findings | str]]:
    case = CASES_BY_NAME[case_name]
    cells = (cell for cell in cells_of(case) if cell not in quick_cells(case, world_size))
    return results(world_size, tuple(Trial(case_name, cell) for cell in cells), SLOW_STEPS)


def results(world_size: int, trials: tuple[Trial, ...], steps: int) -> list[dict[Trial, Findings | str]]:
    """For each rank, what it found in each trial, or why nothing was compared."""
    try:
        ended = run_ranks_to_any_end(compare_trials, world_size, trials, steps, deadline_s=120)
    except RanksFailedError as error:  # They hang: a second start would, too.
        return [{trial: str(error) for trial in trials}] * world_size
    return [
        {trial: (rank.value or {}).get(trial, rank.error or "an earlier trial failed") for trial in trials}
        for rank in ended
    ]


def differences(trial: Trial, ranks: list[dict[Trial, Findings | str]], steps: int) -> list[str]:
    """Each rank's first difference in the trial, "" where there is none; or why nothing was compared."""
    found = []
    for rank in ranks:
        findings = rank[trial]
        if isinstance(findings, str):
            found.append(findings)
            continue
        assert findings.counts["gradient"] > 1
        assert len(findings.history) == steps + 1
        assert math.isfinite(findings.history[-1]["reference_loss"])
        found.append(f"{findings.first.where}: {findings.first}" if findings.first else "")
    return found


@pytest.mark.parametrize(("trial", "world_size"), tuple(parameters_of_every_cell()))
def test_every_bit_equals_native_ddp(trial: Trial, world_size: int) -> None:
    if trial.cell in quick_cells(CASES_BY_NAME[trial.case_name], world_size):
        found = differences(trial, quick_results(world_size), QUICK_STEPS)
    else:
        found = differences(trial, slow_results(world_size, trial.case_name), SLOW_STEPS)
    assert found == [""] * world_size, "\n".join(found)


@pytest.mark.parametrize(
    ("world_size", "trial", "expected"), [pytest.param(*row, id=row[1].candidate) for row in CONTROLS]
)
def test_the_comparison_sees_small_faults(world_size: int, trial: Trial, expected: str) -> None:
    found = differences(trial, quick_results(world_size), QUICK_STEPS)
    if expected:
        assert any(expected in difference for difference in found), found
    else:
        assert found == [""] * world_size, found
