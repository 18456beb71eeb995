"""The simulator finds bugs that are planted: README.md has the table."""

from __future__ import annotations

import logging

import pytest

from simulation.planted import PLANTED, seeds_until_found
from simulation.scenario import draw
from simulation.world import run

LIMIT = 1000
# ``test_found.py`` has a scenario for each of the others.
BUGS = sorted(name for name in PLANTED if not name.startswith("rarely:"))
# Found by the first few seeds.
QUICK = (
    "the first push of a worker is taken for a repeat",
    "every fifth update is acknowledged and dropped",
    "the staleness bound is off by one",
    "the order of ranks is lost",
    "a client does not send again what is missing",
)


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_there_are_enough_to_say_something():
    assert len(BUGS) >= 25
    assert set(QUICK) <= set(BUGS)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in BUGS])
def test_a_planted_bug_is_found(name):
    seeds, violation = seeds_until_found(name, LIMIT)
    assert 0 < seeds <= LIMIT
    assert violation
    assert run(draw(seeds - 1)).violation == ""
