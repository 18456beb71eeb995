"""Every program of the table with one asynchronous worker, against plain training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.server_process import running_server
from ways_of_training.cells import cells_of, check, hold_many_jobs
from ways_of_training.ranks import Ranks, ranks_of
from ways_of_training.table import WITH_ONE_WORKER


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with running_server(shards=2, sabotage=hold_many_jobs) as server, ranks_of(1, server.addresses[0]) as ranks:
        yield ranks


@pytest.mark.parametrize(("name", "column"), cells_of(WITH_ONE_WORKER))
def test_one_worker_trains_as_a_plain_process(ranks: Ranks, name: str, column: str) -> None:
    check(ranks, name, column)
