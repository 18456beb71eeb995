"""Kills, loses and cuts at random, and prints a table of what came of it; see README.md."""

from __future__ import annotations

import sys
from dataclasses import asdict, fields
from pathlib import Path

_ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(_ROOT / "tests"), str(_ROOT / "benchmarks")]

from attacks.bad_links import run_lossy, run_slow  # noqa: E402
from attacks.kill_loop import AVERAGE, Counters, run_async, run_sync  # noqa: E402
from harness.command_line import at_least, parser_of  # noqa: E402
from harness.record import Record  # noqa: E402
from harness.tables import Table  # noqa: E402
from support.server_process import APPLY  # noqa: E402

QUESTION = "What is lost, doubled or let in when servers and workers are killed?"
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
    parser = parser_of(__doc__, rounds=40, quick="one try of each kind")
    parser.add_argument("--tries", dest="rounds", type=at_least(1), help="of each kind: the same as --rounds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=list(ROWS), help="one kind")
    options = parser.parse_args()
    tries = 1 if options.quick else options.rounds
    record = Record.begin("faults", QUESTION, options)
    columns = ["fault", *(field.name.replace("_", " ") for field in fields(Counters))]
    rows = []
    for name, run in ROWS.items():
        if options.only in (None, name):
            rows.append([name, *asdict(run(tries, options.seed)).values()])
            print(dict(zip(columns, rows[-1], strict=True)), flush=True)
    record.tables.append(Table("", columns, rows))
    record.finish()


if __name__ == "__main__":
    main()
