"""What a step costs on several hosts, by the rate and the delay of their links; needs root.

python benchmarks/cluster/run.py [--quick] [--layouts 4x1,2x2] [--rates 10gbit,1gbit,100mbit] [--candidates 'none;sync']
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from harness.command_line import at_least, parser_of, some_of
from harness.figures import number, slowest
from harness.ranks import BENCHMARKS
from harness.record import Record
from harness.tables import Table
from step_overhead.models import WORKLOADS
from support.hosts import Host, emulated_hosts, missing_for_hosts

from psengine.errors import PSEngineError
from psengine.strategies.registry import resolve_strategy

QUESTION = "What does a step cost on several hosts?"
NONE, NATIVE, NATIVE_FP16 = "none", "native", "native-fp16"
OF_THE_BENCHMARK = (NONE, NATIVE, NATIVE_FP16, "hierarchical")
# A candidate is one of these, a strategy as `strategy=` takes it, or COLLECTIVE/STRATEGY.
CANDIDATES = (
    *(NONE, NATIVE, NATIVE_FP16, "sync", "sync:compress=bf16", "sync:compress=fp16", "hierarchical"),
    *("sync-server", "async", "local:every=16", "diloco:every=16"),
)
SERVER_PORT, MASTER_PORT = 7077, 29500
START_S = 60.0


def candidates(text: str) -> tuple[str, ...]:
    """Candidates separated by semicolons, because strategies have commas."""
    chosen = tuple(text.split(";"))
    for name in chosen:
        if name not in OF_THE_BENCHMARK:
            try:
                resolve_strategy(name.rpartition("/")[2])
            except PSEngineError as error:
                raise argparse.ArgumentTypeError(f"{error} (or one of {', '.join(OF_THE_BENCHMARK)})") from error
    return chosen


def layouts(text: str) -> tuple[tuple[int, int], ...]:
    """Such as "4x1,2x2": hosts x ranks on each."""
    found = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", part) for part in text.split(",")]
    if None in found:
        raise argparse.ArgumentTypeError(f"expected hosts x ranks on each, such as 4x1,2x2, got {text}")
    return tuple((int(match[1]), int(match[2])) for match in found if match is not None)


def start_servers(hosts: Sequence[Host], stack: ExitStack) -> str:
    """A server of one shard on each host; returns PSENGINE_SERVERS."""
    command = [sys.executable, "-m", "psengine.cli.server", "--bind", f"tcp://0.0.0.0:{SERVER_PORT}", "--insecure"]
    started = [stack.enter_context(host.start(command, environment={"OMP_NUM_THREADS": "1"})) for host in hosts]
    for server in started:
        server.wait_until(lambda server=server: "ready" in server.stdout + server.stderr, START_S)
    return ",".join(f"tcp://{host.name}:{SERVER_PORT}" for host in hosts)


def measure(
    layout: tuple[int, int], rate: str, options: argparse.Namespace
) -> dict[str, tuple[dict[str, list[float]], dict[str, float]]]:
    """By model: each candidate's seconds of a step on the slowest rank, and bytes of a step from the busiest host."""
    host_count, ranks = layout
    world_size = host_count * ranks
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="psengine-cluster-")))
        hosts = stack.enter_context(
            emulated_hosts(
                host_count, rate=rate, round_trip_s=options.round_trip_ms / 1000, shared=[folder, *_paths_in_tmp()]
            )
        )
        needs_servers = any("server" in name or name.startswith("async") for name in options.candidates)
        servers = {"PSENGINE_SERVERS": start_servers(hosts, stack)} if needs_servers else {}
        plan = {
            "candidates": options.candidates,
            "models": options.models,
            "rounds": options.rounds,
            "warm_up": options.warm_up,
            "deadline_s": options.deadline,
        }
        (folder / "plan.json").write_text(json.dumps(plan))
        processes = []
        for rank in range(world_size):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank % ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": hosts[0].name,
                "MASTER_PORT": str(MASTER_PORT),
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                **servers,
            }
            command = [
                sys.executable,
                BENCHMARKS / "cluster" / "rank.py",
                folder / "plan.json",
                folder / f"{rank}.json",
            ]
            processes.append(stack.enter_context(hosts[rank // ranks].start(command, environment=environment)))
        _wait(processes, options.deadline)
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]
    return {model: _of_all([each[model] for each in found], ranks) for model in options.models}


def _wait(processes: Sequence[Any], deadline_s: float) -> None:
    """Until all have ended; the first that fails ends the run with its output."""
    end_s = time.monotonic() + deadline_s
    while any(process.is_running for process in processes):
        if failed := [process for process in processes if not process.is_running and process.wait(1) != 0]:
            raise RuntimeError(f"a rank on {failed[0].host} failed:\n{failed[0].stdout}\n{failed[0].stderr}")
        if time.monotonic() > end_s:
            raise RuntimeError(f"ranks still run after {deadline_s:g} s: raise --deadline, or lower --rounds")
        time.sleep(0.1)
    if failed := [process for process in processes if process.wait(1) != 0]:
        raise RuntimeError(f"a rank on {failed[0].host} failed:\n{failed[0].stdout}\n{failed[0].stderr}")


def _of_all(
    per_rank: Sequence[Mapping[str, Sequence[tuple[float, float]]]], ranks: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    seconds = slowest([{name: [turn[0] for turn in turns] for name, turns in rank.items()} for rank in per_rank])
    sizes = {
        name: max(statistics.median(turn[1] for turn in rank[name]) for rank in per_rank[::ranks])
        for name in per_rank[0]
    }
    return seconds, sizes


def _paths_in_tmp() -> list[Path]:
    """Folders of /tmp from which modules are imported."""
    return [Path(path) for path in sys.path if path.startswith("/tmp/") and Path(path).is_dir()]


def main() -> None:
    parser = parser_of(__doc__, rounds=5, quick="one round at 1 Gbit/s")
    parser.add_argument("--models", type=some_of(list(WORKLOADS)), default=("gpt", "mlp"), help="default: gpt,mlp")
    parser.add_argument("--layouts", type=layouts, default=((4, 1), (2, 2)), help="hosts x ranks; default: 4x1,2x2")
    parser.add_argument(
        "--rates", type=lambda text: tuple(text.split(",")), default=("10gbit", "1gbit", "100mbit"), help="for tc(8)"
    )
    parser.add_argument("--round-trip-ms", type=float, default=0.0, help="delay; needs rates of at most 100mbit")
    parser.add_argument("--warm-up", type=at_least(0), default=2, help="rounds that are not timed (default: 2)")
    parser.add_argument(
        "--candidates",
        type=candidates,
        default=CANDIDATES,
        help=f"separated by semicolons: {', '.join(OF_THE_BENCHMARK)}, a strategy, or COLLECTIVE/STRATEGY",
    )
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.rates, options.warm_up = 1, ("1gbit",), 1
    record = Record.begin("cluster", QUESTION, options, peers=(NATIVE,), baseline=NONE)
    if (missing := missing_for_hosts()) is not None:
        record.caveat(f"Not measured: {missing}")
        record.finish()
        return
    record.caveat(
        "Hosts are emulated: namespaces of one machine, whose cores all ranks share. So a step without exchange lasts"
        " longer than on hosts of one's own, and an exchange that computes takes its time from other ranks' steps."
    )
    rows = []
    for layout, rate in product(options.layouts, options.rates):
        for model, (seconds, sizes) in measure(layout, rate, options).items():
            labels = {"model": model, "hosts x ranks": f"{layout[0]} x {layout[1]}", "link": rate}
            if options.round_trip_ms:
                labels["round trip"] = f"{options.round_trip_ms:g} ms"
            record.add(labels, seconds)
            rows += [[*labels.values(), name, number(size / 1e6)] for name, size in sizes.items()]
    columns = [*record.cases[0].labels, "candidate", "MB"]
    record.tables.append(Table("MB that a host sends for a step, by the counters of its interface", columns, rows))
    record.finish()


if __name__ == "__main__":
    main()
