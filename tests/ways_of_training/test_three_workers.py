"""Every program of the table with three workers, against native DDP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.server_process import running_server
from ways_of_training.cells import cells_of, check
from ways_of_training.ranks import Ranks, ranks_of
from ways_of_training.table import WITH_THREE_WORKERS


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with running_server() as server, ranks_of(3, server.addresses[0]) as ranks:
        yield ranks


@pytest.mark.parametrize(("name", "column"), cells_of(WITH_THREE_WORKERS))
def test_three_workers_train_as_under_native_ddp(ranks: Ranks, name: str, column: str) -> None:
    check(ranks, name, column)
