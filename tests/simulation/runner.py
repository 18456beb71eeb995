"""Run many seeds, each twice, under two hash seeds of Python; print failures, shrunk, and what was covered.

make simulate SEEDS=1000000 JOBS=2
python tests/simulation/runner.py --seeds 1000 --jobs 2 --first 0
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HASH_SEEDS = ("1", "2")
BATCH = 50
MAX_FAILURES = 20


@dataclass
class Coverage:
    """What a run of the runner has seen."""

    seeds: int = 0
    events: int = 0
    answered: int = 0
    simulated_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    transitions: set[str] = field(default_factory=set)
    failures: dict[int, str] = field(default_factory=dict)

    def add(self, batch: dict[str, Any]) -> None:
        """One batch, of one of the two runs."""
        self.seeds += len(batch["digests"])
        self.events += batch["events"]
        self.answered += batch["answered"]
        self.simulated_s += batch["simulated_s"]
        self.counts.update(batch["counts"])
        self.transitions.update(batch["transitions"])
        self.failures.update({int(seed): text for seed, text in batch["failures"].items()})


def run_seeds(first: int, count: int, jobs: int) -> Coverage:
    """Run ``count`` seeds; a seed whose two runs differ counts as a failure."""
    batches = [(start, min(BATCH, first + count - start)) for start in range(first, first + count, BATCH)]
    queues: dict[str, SimpleQueue[tuple[int, int]]] = {hash_seed: SimpleQueue() for hash_seed in HASH_SEEDS}
    for queue in queues.values():
        for batch in batches:
            queue.put(batch)
    coverage = Coverage()
    digests: dict[int, list[str]] = {}
    turns = [HASH_SEEDS[number % 2] for number in range(max(2, jobs))]
    with ThreadPoolExecutor(jobs) as pool:
        for found in pool.map(lambda hash_seed: list(_work(hash_seed, queues[hash_seed], coverage)), turns):
            for batch in found:
                for seed, digest in enumerate(batch["digests"], batch["first"]):
                    digests.setdefault(seed, []).append(digest)
                coverage.add(batch)
    coverage.seeds //= 2
    for seed, pair in digests.items():
        if len(pair) != 2 or pair[0] != pair[1]:
            coverage.failures.setdefault(seed, f"two runs differ: {pair}")
    return coverage


def _work(hash_seed: str, queue: SimpleQueue[tuple[int, int]], coverage: Coverage) -> Iterator[dict[str, Any]]:
    """A process that takes batches, until there are none."""
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-m", "simulation.batch"]
    with subprocess.Popen(
        command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            while len(coverage.failures) < MAX_FAILURES:
                try:
                    first, count = queue.get_nowait()
                except Empty:
                    break
                process.stdin.write(f"{first} {count}\n")
                process.stdin.flush()
                line = process.stdout.readline()
                if not line:
                    raise RuntimeError(f"the process that ran seeds {first} to {first + count - 1} has ended")
                batch = json.loads(line)
                coverage.failures.update({int(seed): text for seed, text in batch["failures"].items()})
                yield batch
        finally:
            process.stdin.close()


def describe(coverage: Coverage, wall_s: float, everything: set[str]) -> str:
    """For people."""
    reached, missing = coverage.transitions & everything, sorted(everything - coverage.transitions)
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(coverage.counts.items()))
    return (
        f"{coverage.seeds} seeds, each twice, in {wall_s:.0f} s ({coverage.seeds / wall_s:.0f} seeds/s):"
        f" {len(coverage.failures)} failures\n"
        f"{coverage.events} events, {coverage.answered} answered pushes, {coverage.simulated_s / 3600:.1f} simulated"
        f" hours, in both runs together\n"
        f"faults and what came of them: {kinds}\n"
        f"{len(reached)} of {len(everything)} transitions of jobs and workers reached; not:"
        f" {', '.join(missing) or 'none'}"
    )


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--shrink", type=int, default=3, help="how many failures are made small")
    arguments = parser.parse_args()
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    from simulation.batch import all_transitions
    from simulation.scenario import draw
    from simulation.shrinking import shrink

    began_s = time.monotonic()
    coverage = run_seeds(arguments.first, arguments.seeds, arguments.jobs)
    print(describe(coverage, time.monotonic() - began_s, all_transitions()))
    for number, (seed, text) in enumerate(sorted(coverage.failures.items())):
        print(f"\nseed {seed}: {text}")
        if number < arguments.shrink and not text.startswith("two runs differ"):
            print(f"shrunk: {shrink(draw(seed))!r}")
    return 1 if coverage.failures else 0


if __name__ == "__main__":
    sys.exit(main())
