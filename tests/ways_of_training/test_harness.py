"""The table can turn red: programs that are wrong on purpose, and what is said of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
from support.server_process import running_server
from ways_of_training.networks import classify, mlp
from ways_of_training.ranks import Cell, Ranks, ranks_of
from ways_of_training.run import Run
from ways_of_training.table import SAME_BITS, Expected, Program, apart_from, fault, refused, within


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with running_server() as server, ranks_of(2, server.addresses[0]) as ranks:
        yield ranks


def train(run: Run, *, nudge: float = 0.0) -> None:
    """``nudge`` moves one weight on rank 1, in ours alone."""
    model = run.wrap(mlp())
    optimizer = run.sgd(model)
    for x, y in run.batches(2):
        optimizer.zero_grad()
        classify(model, x, y).backward()
        optimizer.step()
    if run.column != "native" and run.rank == 1:
        with torch.no_grad():
            model.module[2].bias[3] += nudge


def right(run: Run) -> None:
    train(run)


def nudged(run: Run) -> None:
    train(run, nudge=1e-3)


def notes_once_more(run: Run) -> None:
    train(run)
    if run.column != "native":
        run.note(1.0)


def raises_on_one_rank(run: Run) -> None:
    if run.column != "native" and run.rank == 1:
        raise ValueError("a strange batch")
    train(run)


def raises_everywhere(run: Run) -> None:
    raise ValueError("a strange batch")


def hangs(run: Run) -> None:
    train(run)
    if run.column != "native" and run.rank == 0:
        time.sleep(60)


def dies(run: Run) -> None:
    train(run)
    if run.column != "native" and run.rank == 1:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def compares_nothing(run: Run) -> None:
    pass


# Expected in the table, and the texts of the report; none: the cell is green.
CASES: list[tuple[Program, Expected, list[str]]] = [
    (right, SAME_BITS, []),
    (nudged, SAME_BITS, ["rank 1: parameter 2.bias: 1 of 8 numbers differ, by up to 0.001 at [3]"]),
    (nudged, within(1e-2, "a test"), []),
    (nudged, within(1e-4, "a test"), ["rank 1: parameter 2.bias: off by 0.001"]),
    (nudged, apart_from("parameter 2.", reason="a test"), []),
    (nudged, apart_from("gradient", reason="a test"), ["rank 1: parameter 2.bias"]),
    (nudged, fault("parameter 2.bias"), []),
    (right, fault("parameter 2.bias"), ["is gone"]),
    (notes_once_more, SAME_BITS, ["only one side has note 0"]),
    (raises_everywhere, SAME_BITS, ["the oracle failed", "ValueError: a strange batch"]),
    (right, refused("strange"), ["nothing was refused"]),
    (compares_nothing, SAME_BITS, ["nothing was compared"]),
    (dies, SAME_BITS, ["rank 1: the process died", "last words"]),
]


@pytest.mark.parametrize(("program", "expected", "texts"), CASES)
def test_what_is_said_of_a_cell(ranks: Ranks, program: Program, expected: Expected, texts: list[str]) -> None:
    wrong = ranks.run(Cell(program, "c10d", expected, SAME_BITS))
    assert (wrong is None) == (not texts), wrong
    for text in texts:
        assert text in str(wrong)


def test_a_refusal_of_the_oracle_counts_for_both_sides(ranks: Ranks) -> None:
    strange, other = refused("a strange batch"), refused("a full disk")
    assert ranks.run(Cell(raises_everywhere, "c10d", strange, strange)) is None
    assert "with other words" in str(ranks.run(Cell(raises_everywhere, "c10d", other, strange)))
    assert "the oracle refused nothing" in str(ranks.run(Cell(right, "c10d", SAME_BITS, strange)))


def test_a_rank_that_hangs_is_named_with_its_stack_and_the_next_cell_runs(ranks: Ranks) -> None:
    assert ranks.run(Cell(right, "c10d", SAME_BITS, SAME_BITS)) is None  # everything is imported
    wrong = str(ranks.run(Cell(hangs, "c10d", SAME_BITS, SAME_BITS), deadline_s=2.0))
    assert "rank 0: it did not end in time" in wrong
    assert "in hangs" in wrong
    assert "rank 1" not in wrong
    assert ranks.run(Cell(right, "sync_server", SAME_BITS, SAME_BITS)) is None


def test_a_rank_that_fails_alone_ends_the_wait_for_the_others(ranks: Ranks) -> None:
    wrong = str(ranks.run(Cell(raises_on_one_rank, "c10d", SAME_BITS, SAME_BITS), failed_deadline_s=0.5))
    assert "rank 0: it did not end in time" in wrong
    assert "rank 1: Traceback" in wrong
    assert "ValueError: a strange batch" in wrong
