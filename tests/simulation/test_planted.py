"""The simulator finds bugs that are planted: see ``planted/``."""

from __future__ import annotations

import pytest

from simulation.planted import PLANTED, seeds_until_found
from simulation.scenario import draw
from simulation.world import run

LIMIT = 1000
# Found by the first few seeds.
QUICK = (
    "every fifth update is acknowledged and dropped",
    "a client keeps views to itself",
    "views do not grow",
    "a log goes on after an fsync that failed",
    "a torn record is taken for damage",
    "an elastic newcomer keeps its initial values",
    "a follower ignores what coordinators decide",
)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(PLANTED)]
)
def test_a_planted_bug_is_found(name):
    seeds, violation = seeds_until_found(name, LIMIT)
    assert 0 < seeds <= LIMIT
    assert violation
    assert run(draw(seeds - 1)).violation == ""
