"""Seeds keep every promise; what they found once stays mended."""

from __future__ import annotations

import gc
import os

import pytest

from simulation.runner import describe, run_seeds
from simulation.scenario import draw
from simulation.world import run


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("first", "seeds"), [(0, 200), pytest.param(200, 800, marks=pytest.mark.slow)])
def test_seeds_keep_every_promise_and_do_the_same_twice(first, seeds):
    coverage = run_seeds(first, seeds, jobs=2)
    assert not coverage.failures, describe(coverage, 1.0)
    assert len(coverage.digests) == seeds
    assert coverage.answered > 10 * seeds


def test_a_run_keeps_no_descriptor_open():
    """A process of the runner runs some hundred thousand seeds."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for seed in range(20):
        run(draw(seed))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
