"""Seeds keep every promise; what they found once stays mended."""

from __future__ import annotations

import gc
import os

import pytest

from simulation.planted import planted
from simulation.runner import describe, run_seeds
from simulation.scenario import Fault, Scenario, draw
from simulation.shrinking import shrink
from simulation.world import run

SEEDS = 1000


@pytest.mark.timeout(900)
def test_seeds_keep_every_promise_and_do_the_same_twice():
    coverage = run_seeds(0, SEEDS, jobs=2, again=SEEDS // 4)
    assert not coverage.failures, describe(coverage, 1.0)
    assert len(coverage.digests) == SEEDS
    assert coverage.answered > 10 * SEEDS


def test_a_broken_promise_is_found_and_shrinks_to_the_fault_that_matters():
    breaks = Fault("break", 1.4, 0.2, 0, 0, 0.1, "PUSH")
    harmless = Fault("stop worker", 0.5, 0.3, 1, 0, 0.1)
    scenario = Scenario(seed=1, workers=2, steps=8, chunks=1, max_staleness=0, faults=(harmless, breaks))
    assert run(scenario).violation == ""
    with planted("a push that is here is taken for a new one"):
        assert run(scenario).violation
        assert shrink(scenario).faults == (breaks,)


def test_a_run_keeps_no_descriptor_open():
    """A process of the runner runs some hundred thousand seeds."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for seed in range(20):
        run(draw(seed))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_seed_is_the_same_scenario_everywhere():
    assert draw(7) == draw(7)
    assert eval(repr(draw(7))) == draw(7)
