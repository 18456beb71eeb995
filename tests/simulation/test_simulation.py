"""Seeds keep every promise; what they found once stays mended."""

from __future__ import annotations

import gc
import os

import pytest

from simulation.runner import describe, run_seeds
from simulation.scenario import draw
from simulation.world import run

SEEDS = 600


@pytest.mark.timeout(900)
def test_seeds_keep_every_promise_and_do_the_same_twice():
    coverage = run_seeds(0, SEEDS, jobs=2, again=SEEDS // 4)
    assert not coverage.failures, describe(coverage, 1.0)
    assert len(coverage.digests) == SEEDS
    assert coverage.answered > 10 * SEEDS


def test_a_run_keeps_no_descriptor_open():
    """A process of the runner runs some hundred thousand seeds."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for seed in range(20):
        run(draw(seed))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
