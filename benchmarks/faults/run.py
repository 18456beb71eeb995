"""Kills and cuts power at random, and prints tables of what came of it; see README.md."""

from __future__ import annotations

import itertools
import signal
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(_ROOT / "tests"), str(_ROOT / "benchmarks"), str(Path(__file__).parent)]

import torch  # noqa: E402
from attacks.kill_loop import Counters, run_async, run_failover  # noqa: E402
from harness.command_line import at_least, parser_of, some_of  # noqa: E402
from harness.record import Record  # noqa: E402
from harness.tables import Table  # noqa: E402
from support.etcd_server import etcd_server  # noqa: E402
from support.shard_world import APPLY, AVERAGE  # noqa: E402

QUESTION = "What is lost or doubled when things go wrong?"
COLUMNS = ["fault", *(field.name.replace("_", " ") for field in fields(Counters) if field.compare)]
TIERS = ("snapshot", "log")
REPLICA_TIERS = ("replica", "log+replica")


def row(name: str, counters: Counters) -> list[Any]:
    print(f"{name}: {asdict(counters)}", flush=True)
    return [name, *(value for count, value in asdict(counters).items() if count != "takeovers_s")]


def kills(options: Namespace, of: str, worker_share: float) -> Table:
    rows = []
    for tier in options.tiers:
        found = run_async(options.rounds, options.seed, worker_share, tier, options.most_s)
        rows.append(row(f"async, {tier}: {of} killed", found))
    return Table("", COLUMNS, rows)


def failover(options: Namespace) -> Table:
    rows = []
    for tier, workers, rule in itertools.product(REPLICA_TIERS, (2, 3), (APPLY, AVERAGE)):
        name = f"{'averaging' if rule is AVERAGE else 'async'}, {tier}, {workers} workers"
        with ExitStack() as stack:
            etcd = stack.enter_context(etcd_server()) if options.election == "etcd" else None
            election = None if etcd is None else f"etcd={etcd.place}/{{}}".format
            kinds: dict[str, Any] = {"workers": workers, "rule": rule, "election": election}
            found = run_failover(options.rounds, options.seed, tier, most_s=options.most_s, **kinds)
        taken_s = torch.tensor(found.takeovers_s, dtype=torch.float64)
        rows.append([*row(name, found), *(round(taken_s.quantile(one).item(), 2) for one in (0.5, 0.99))])
    return Table("", [*COLUMNS, "takeover median s", "p99 s"], rows)


def power(options: Namespace) -> Table:
    from power import cut_power

    rows = [
        row(f"async, {tier}: power cut", cut_power(options.rounds, options.seed, tier, options.most_s))
        for tier in options.tiers
    ]
    return Table("", COLUMNS, rows)


STUDIES: dict[str, Callable[[Namespace], Table]] = {
    "server-kills": partial(kills, of="server", worker_share=0.0),
    "worker-kills": partial(kills, of="worker", worker_share=1.0),
    "failover-kills": failover,
    "power": power,
}


def main() -> None:
    parser = parser_of(__doc__, rounds=300, quick="one try of each kind")
    add = parser.add_argument
    add("--study", type=some_of(list(STUDIES)), default=tuple(STUDIES), help="some of %(default)s")
    add("--tries", dest="rounds", type=at_least(1), help="of each kind: the same as --rounds")
    add("--tiers", type=some_of(TIERS), default=TIERS, help="of durability: some of %(default)s")
    add("--election", choices=("launcher", "etcd"), default="launcher", help="who says which server leads")
    add("--seed", type=int, default=1)
    add("--most-s", type=float, default=float("inf"), help="seconds after which a row of tries ends early")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # mounts and processes are given back
    if options.quick:
        options.rounds = 1
    record = Record.begin("faults", QUESTION, options)
    for name in options.study:
        record.tables.append(STUDIES[name](options))
    record.finish()


if __name__ == "__main__":
    main()
