"""Run many seeds, every tenth twice, under two hash seeds of Python; print failures, shrunk, and what was covered.

make simulate SEEDS=1000000 JOBS=2
PYTHONPATH=tests:. python tests/simulation/runner.py --seeds 1000 --jobs 2 --first 0

With ``--record`` the run is appended to ``runs.tsv``, beside the digest of what was simulated (``records.py``); and
without ``--first`` it goes on after the seeds that the file has of this digest. So slices add up.
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
from datetime import date
from multiprocessing import get_context
from unittest import mock

import torch

from simulation.records import Record, append, next_seed, recorded, seeds_of, sources_digest
from simulation.scenario import draw
from simulation.shrinking import shrink
from simulation.world import run

HASH_SEEDS = ("1", "2")
# So many seeds in a task, and one in so many runs twice: what differs from run to run differs in most seeds.
BATCH = 50
TWICE_EVERY = 10
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
    gc.disable()


def run_batch(seeds: range) -> Coverage:
    """Run these seeds, once."""
    coverage = Coverage()
    for number, seed in enumerate(seeds):
        result = run(draw(seed))
        failures = {seed: result.violation} if result.violation else {}
        seen = result.events, result.answered, result.simulated_s, result.counts, failures, {seed: [result.digest]}
        coverage.add(Coverage(*seen))
        if number % SEEDS_PER_COLLECTION == 0:
            gc.collect()
            gc.freeze()  # what is left was imported, perhaps by a run, as torch does, and never is garbage
    return coverage


# ---- who starts them -------------------------------------------------------------------------------------------------


def run_seeds(first: int, count: int, jobs: int) -> Coverage:
    """Run ``count`` seeds, every tenth twice; that two runs differ counts as a failure."""
    coverage, futures = Coverage(), list[Future[Coverage]]()
    once, twice = range(first, first + count), range(first, first + count, TWICE_EVERY)
    with ExitStack() as stack:
        for hash_seed, seeds, processes in zip(HASH_SEEDS, (once, twice), (jobs, 1), strict=True):
            pool = ProcessPoolExecutor(processes, get_context("spawn"), _begin)
            stack.callback(pool.shutdown, cancel_futures=True)
            with mock.patch.dict(os.environ, PYTHONHASHSEED=hash_seed, OMP_NUM_THREADS="1"):
                for start in range(0, len(seeds), BATCH):
                    futures.append(pool.submit(run_batch, seeds[start : start + BATCH]))
        for future in as_completed(futures):
            coverage.add(future.result())
            if len(coverage.failures) >= MAX_FAILURES:
                return coverage
    for seed, found in coverage.digests.items():
        if len(found) != 1 + (seed in twice) or len(set(found)) > 1:
            coverage.failures.setdefault(seed, f"two runs differ: {found}")
    return coverage


def describe(coverage: Coverage, wall_s: float) -> str:
    """For people."""
    seeds = len(coverage.digests)
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(coverage.counts.items()))
    return (
        f"{seeds} seeds, every tenth twice, in {wall_s:.0f} s ({seeds / wall_s:.1f} seeds/s):"
        f" {len(coverage.failures)} failures\n"
        f"{coverage.events} events, {coverage.answered} answered pushes, {coverage.simulated_s / 3600:.1f} simulated"
        f" hours, in all runs together\n"
        f"faults and what came of them: {kinds}"
    )


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, help="the first of them; default: after those that runs.tsv has")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time, and one for second runs")
    parser.add_argument("--shrink", type=int, default=3, help="how many failures are made small")
    parser.add_argument("--record", action="store_true", help="append the run to runs.tsv")
    arguments = parser.parse_args()
    sources = sources_digest()
    first = next_seed(recorded(), sources) if arguments.first is None else arguments.first
    began_s = time.monotonic()
    coverage = run_seeds(first, arguments.seeds, arguments.jobs)
    wall_s = time.monotonic() - began_s
    print(f"from seed {first} on: {describe(coverage, wall_s)}")
    for number, (seed, text) in enumerate(sorted(coverage.failures.items())):
        print(f"\nseed {seed}: {text}")
        if number < arguments.shrink and not text.startswith("two runs differ"):
            print(f"shrunk: {shrink(draw(seed))!r}")
    if arguments.record:
        append(Record(date.today().isoformat(), sources, first, len(coverage.digests), len(coverage.failures)))
        print(f"\n{seeds_of(recorded(), sources)} seeds of these sources ({sources}) in runs.tsv")
    return 1 if coverage.failures else 0


if __name__ == "__main__":
    sys.exit(main())
