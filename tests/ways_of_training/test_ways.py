"""Every program of the table, with several workers against native DDP, with one against plain training."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module

import pytest
import torch
from support.server_process import running_server
from ways_of_training.ranks import Cell, Ranks
from ways_of_training.table import COLUMNS, ROWS, SYNC, oracle_of, workers_of

from psengine.parameter_server.server.coordinator import coordinators
from psengine.parameter_server.server.shard import shard

SUBJECTS = (
    *("wrapping", "outputs", "layers", "buffers", "freezing", "precision", "gradients", "accumulation"),
    *("recomputation", "skipped_batches", "optimizers", "loops", "saving", "companions"),
)
for subject in SUBJECTS:  # importing one enters its rows in the table
    import_module(f"ways_of_training.{subject}")

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def hold_many_jobs() -> None:
    """In a server's process: an asynchronous job stays when its worker has left, and there is one for each cell."""
    shard.MAX_JOBS = coordinators.MAX_JOBS = 4096


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """World size to ranks of that world."""
    with ExitStack() as stack:
        server = stack.enter_context(running_server(shards=2, sabotage=hold_many_jobs))
        started: dict[int, Ranks] = {}

        def of(world_size: int) -> Ranks:
            if world_size not in started:
                started[world_size] = Ranks(world_size, server.addresses[0])
                stack.callback(started[world_size].stop)
            return started[world_size]

        yield of


def cells() -> Iterator[object]:
    """Every cell that is run. In the quick suite a row takes one of sync's columns, and every fourth three workers."""
    for column in COLUMNS:
        for index, row in enumerate(ROWS.values()):
            if row.expects(column).left_out:
                continue
            is_in_turn = column == tuple(SYNC)[index % len(SYNC)] or (column == "three_workers" and index % 4 == 0)
            is_slow = row.is_slow or (not is_in_turn and column in (*SYNC, "three_workers"))
            marks = [pytest.mark.slow] if is_slow else []
            if row.oldest_torch > TORCH:
                marks.append(pytest.mark.skip(reason="this version's native DDP cannot train so"))
            yield pytest.param(row.name, column, id=f"{row.name}-{column}", marks=marks)


@pytest.mark.parametrize(("name", "column"), list(cells()))
def test_a_way_of_training(ranks: Callable[[int], Ranks], name: str, column: str) -> None:
    row = ROWS[name]
    cell = Cell(row.program, column, row.expects(column), row.expects(oracle_of(column)))
    if wrong := ranks(workers_of(column)).run(cell):
        pytest.fail(f"{name}, {column}: {wrong}", pytrace=False)
