"""A failing scenario, made small: fewer faults, then a smaller job, as long as it fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from simulation.scenario import Scenario
from simulation.world import run

MAX_RUNS = 300


def shrink(scenario: Scenario, max_runs: int = MAX_RUNS) -> Scenario:
    """The smallest that was found within so many runs; it fails, perhaps otherwise than ``scenario``."""
    is_smaller = True
    while is_smaller and max_runs > 0:
        is_smaller = False
        for candidate in _smaller(scenario):
            max_runs -= 1
            if run(candidate).violation:
                scenario, is_smaller = candidate, True
                break
            if max_runs <= 0:
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    faults = scenario.faults
    half = len(faults) // 2
    if half > 1:
        yield replace(scenario, faults=faults[half:])
        yield replace(scenario, faults=faults[:half])
    for index in range(len(faults)):
        yield replace(scenario, faults=faults[:index] + faults[index + 1 :])
    named = [fault.server for fault in faults] + [index for later in scenario.later for index in later.servers]
    servers = 1 + max(named, default=0)
    if scenario.companion is not None:
        yield replace(scenario, companion=None)
    if scenario.has_reader:
        yield replace(scenario, has_reader=False)
    least = {"joins_s": (), "leaves": (), "shares": 0, "codec": "", "servers": servers, "shards": 1, "chunks": 1}
    for name, value in least.items():
        if getattr(scenario, name) != value:
            yield replace(scenario, **{name: value})
    if scenario.steps > 1:
        yield replace(scenario, steps=scenario.steps - 1)
    if scenario.workers > 1 and all(fault.rank < scenario.workers - 1 for fault in faults):
        yield replace(scenario, workers=scenario.workers - 1)
