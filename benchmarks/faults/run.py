"""Kills, loses and cuts at random, and prints a table of what came of it; see README.md."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

_ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(_ROOT / "tests"), str(_ROOT / "benchmarks")]

from attacks.bad_links import run_lossy, run_slow  # noqa: E402
from attacks.kill_loop import AVERAGE, Counters, run_async, run_sync  # noqa: E402
from machine import describe_machine  # noqa: E402
from support.server_process import APPLY  # noqa: E402

ROWS = {
    "async, server killed": lambda tries, seed: run_async(tries, seed, 0.0),
    "async, worker killed": lambda tries, seed: run_async(tries, seed, 1.0),
    "sync-server, server killed": lambda tries, seed: run_sync(tries, seed, worker_share=0.0),
    "sync-server, worker killed": lambda tries, seed: run_sync(tries, seed, worker_share=1.0),
    "async, lossy proxy": lambda tries, seed: run_lossy(tries, seed, APPLY),
    "sync-server, lossy proxy": lambda tries, seed: run_lossy(tries, seed, AVERAGE),
    "async, slow link cut": lambda tries, seed: run_slow(tries, seed, APPLY),
    "sync-server, slow link cut": lambda tries, seed: run_slow(tries, seed, AVERAGE),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=40, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=list(ROWS), help="one kind")
    options = parser.parse_args()
    names = list(asdict(Counters()))
    print(describe_machine(f"seed {options.seed}"), flush=True)
    print("| what |", " | ".join(name.replace("_", " ") for name in names), "|")
    print("|---|" + "---|" * len(names), flush=True)
    for row, run in ROWS.items():
        if options.only in (None, row):
            found = asdict(run(options.tries, options.seed))
            print(f"| {row} |", " | ".join(str(found[name]) for name in names), "|", flush=True)


if __name__ == "__main__":
    main()
