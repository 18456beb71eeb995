"""A process that runs seeds: ``FIRST COUNT`` lines come in, one line of JSON goes out for each."""

from __future__ import annotations

import gc
import json
import logging
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from psengine.parameter_server.server.coordinator import coordinator, states, workers
from simulation.scenario import draw
from simulation.world import run

SEEDS_PER_COLLECTION = 10


def watch_states() -> set[str]:
    """The transitions of jobs and of their workers that have happened since; for the whole process."""
    taken: set[str] = set()

    def after(table: Mapping[Any, Mapping[Any, Any]], state: Any, event: Any) -> Any:
        taken.add(f"{'job' if table is states.JOB else 'worker'}: {state.value} + {event}")
        return states.after(table, state, event)

    for module in (coordinator, workers):
        if hasattr(module, "after"):
            module.after = after  # type: ignore[attr-defined]
    return taken


def all_transitions() -> set[str]:
    """Those of the tables."""
    return {
        f"{kind}: {state.value} + {event}"
        for kind, table in (("job", states.JOB), ("worker", states.WORKER))
        for state, events in table.items()
        for event in events
    }


def run_batch(first: int, count: int) -> dict[str, Any]:
    """What the runner wants to know of these seeds."""
    counts: Counter[str] = Counter()
    found: dict[str, Any] = {"first": first, "digests": [], "failures": {}, "events": 0, "answered": 0}
    simulated_s = 0.0
    for seed in range(first, first + count):
        result = run(draw(seed))
        found["digests"].append(result.digest)
        found["events"] += result.events
        found["answered"] += result.answered
        simulated_s += result.simulated_s
        counts.update(result.counts)
        if result.violation:
            found["failures"][seed] = result.violation
        if seed % SEEDS_PER_COLLECTION == 0:
            gc.collect()
    return {**found, "simulated_s": simulated_s, "counts": counts}


def main() -> None:
    """Until the input ends."""
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    # Between runs a run's cycles are most of what a collection looks at; what was imported never is garbage.
    gc.disable()
    gc.freeze()
    taken = watch_states()
    for line in sys.stdin:
        first, count = map(int, line.split())
        found = run_batch(first, count)
        print(json.dumps({**found, "transitions": sorted(taken)}), flush=True)


if __name__ == "__main__":
    main()
