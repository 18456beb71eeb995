"""Run many seeds, each twice, under two hash seeds of Python; print failures, shrunk, and what was covered.

make simulate SEEDS=1000000 JOBS=2
PYTHONPATH=tests:. python tests/simulation/runner.py --seeds 1000 --jobs 2 --first 0
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_context
from unittest import mock

import torch

from simulation.scenario import draw
from simulation.shrinking import shrink
from simulation.world import run

HASH_SEEDS = ("1", "2")
BATCH = 50
SEEDS_PER_COLLECTION = 10
MAX_FAILURES = 20


@dataclass
class Coverage:
    """What runs of seeds have seen; ``digests`` by seed, of each of its runs."""

    events: int = 0
    answered: int = 0
    simulated_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)
    digests: dict[int, list[str]] = field(default_factory=dict)

    def add(self, other: Coverage) -> None:
        """Take over what another has seen."""
        self.events += other.events
        self.answered += other.answered
        self.simulated_s += other.simulated_s
        self.counts.update(other.counts)
        self.failures |= other.failures
        for seed, digests in other.digests.items():
            self.digests.setdefault(seed, []).extend(digests)


# ---- processes that run seeds ----------------------------------------------------------------------------------------


def _begin() -> None:
    warnings.simplefilter("error")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    # Between runs a run's cycles are most of what a collection looks at; what was imported never is garbage.
    gc.disable()
    gc.freeze()


def run_batch(first: int, count: int) -> Coverage:
    """Run these seeds, once."""
    coverage = Coverage()
    for seed in range(first, first + count):
        result = run(draw(seed))
        failures = {seed: result.violation} if result.violation else {}
        seen = result.events, result.answered, result.simulated_s, result.counts, failures, {seed: [result.digest]}
        coverage.add(Coverage(*seen))
        if seed % SEEDS_PER_COLLECTION == 0:
            gc.collect()
    return coverage


# ---- who starts them -------------------------------------------------------------------------------------------------


def run_seeds(first: int, count: int, jobs: int, again: int | None = None) -> Coverage:
    """Run ``count`` seeds, the first ``again`` of them (all) twice; that two runs differ counts as a failure."""
    counts = count, count if again is None else again
    coverage, futures = Coverage(), list[Future[Coverage]]()
    with ExitStack() as stack:
        for hash_seed, number in zip(HASH_SEEDS, counts, strict=True):
            pool = ProcessPoolExecutor(max(1, jobs // 2), get_context("spawn"), _begin)
            stack.callback(pool.shutdown, cancel_futures=True)
            with mock.patch.dict(os.environ, PYTHONHASHSEED=hash_seed, OMP_NUM_THREADS="1"):
                for start in range(first, first + number, BATCH):
                    futures.append(pool.submit(run_batch, start, min(BATCH, first + number - start)))
        for future in as_completed(futures):
            coverage.add(future.result())
            if len(coverage.failures) >= MAX_FAILURES:
                return coverage
    for seed, found in coverage.digests.items():
        if len(found) != (2 if seed < first + counts[1] else 1) or len(set(found)) > 1:
            coverage.failures.setdefault(seed, f"two runs differ: {found}")
    return coverage


def describe(coverage: Coverage, wall_s: float) -> str:
    """For people."""
    seeds = len(coverage.digests)
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(coverage.counts.items()))
    return (
        f"{seeds} seeds, each twice, in {wall_s:.0f} s ({seeds / wall_s:.0f} seeds/s):"
        f" {len(coverage.failures)} failures\n"
        f"{coverage.events} events, {coverage.answered} answered pushes, {coverage.simulated_s / 3600:.1f} simulated"
        f" hours, in both runs together\n"
        f"faults and what came of them: {kinds}"
    )


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time, at least 2")
    parser.add_argument("--shrink", type=int, default=3, help="how many failures are made small")
    arguments = parser.parse_args()
    began_s = time.monotonic()
    coverage = run_seeds(arguments.first, arguments.seeds, arguments.jobs)
    print(describe(coverage, time.monotonic() - began_s))
    for number, (seed, text) in enumerate(sorted(coverage.failures.items())):
        print(f"\nseed {seed}: {text}")
        if number < arguments.shrink and not text.startswith("two runs differ"):
            print(f"shrunk: {shrink(draw(seed))!r}")
    return 1 if coverage.failures else 0


if __name__ == "__main__":
    sys.exit(main())
