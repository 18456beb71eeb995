"""Some kills of each kind; ``benchmarks/faults/run.py`` makes many."""

from __future__ import annotations

import pytest
from attacks.averaging_kills import run_sync
from attacks.kill_loop import Counters, run_async


def test_async_accounts_for_every_update():
    found = run_async(tries=1, seed=1, worker_share=0.0)
    assert found == Counters(tries=1, survived=1, lost=found.lost)
    assert found.lost > 0


@pytest.mark.slow
def test_killed_workers_and_averages_lose_and_double_nothing():
    """This seed of "sync-server" kills the server when two workers have the last average and the third has not."""
    assert run_async(tries=1, seed=2, worker_share=1.0) == Counters(tries=1, survived=1)
    assert run_sync(tries=1, seed=4, worker_share=0.0) == Counters(tries=1, survived=1)
