"""Some kills of each kind; ``benchmarks/faults/run.py`` makes many."""

from __future__ import annotations

import pytest
from attacks.kill_loop import Counters, run_async, run_failover
from support.marks import slow
from support.shard_world import APPLY, AVERAGE


def test_async_accounts_for_every_update_of_a_killed_server():
    found = run_async(tries=1, seed=1, worker_share=0.0, snapshot_interval_s=0.0)  # none but those asked for
    assert found == Counters(tries=1, survived=1, lost=found.lost)
    assert found.lost > 0


@pytest.mark.parametrize("max_staleness", [2, slow(None)])
def test_async_workers_killed_lose_and_double_nothing_and_hold_nobody_up(max_staleness):
    found = run_async(tries=1, seed=2, worker_share=1.0, max_staleness=max_staleness)
    assert found == Counters(tries=1, survived=1)


@pytest.mark.parametrize(
    ("tier", "workers", "rule", "tries"),
    [
        ("replica", 3, APPLY, 2),
        ("log+replica", 2, APPLY, 2),
        slow("replica", 2, AVERAGE, 10),
        slow("log+replica", 3, AVERAGE, 10),
        slow("log+replica", 3, APPLY, 30),
    ],
)
def test_servers_with_followers_lose_and_double_nothing_and_never_lead_both(tier, workers, rule, tries):
    found = run_failover(tries, 3, tier, workers=workers, rule=rule)
    assert found == Counters(tries=found.tries, survived=found.tries)
