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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from harness.command_line import at_least, parser_of, some_of
from harness.figures import number, slowest
from harness.record import Record
from harness.tables import Table
from harness.turns import Turn, labels_of, take_turns, wall_clock
from step_overhead.models import WORKLOADS
from support.hosts import Host, emulated_hosts, missing_for_hosts

import psengine

QUESTION = "What does a step cost on several hosts?"
NONE, NATIVE = "none", "native"
# A candidate is one of these two, "hierarchical", or a strategy as `strategy=` takes it.
CANDIDATES = "none;native;sync;sync:compress=bf16;hierarchical;sync-server;async;local:every=16"
SERVER_PORT, MASTER_PORT = 7077, 29500
START_S = 60.0
# On a link that is quiet no more than this is sent in an interval: heartbeats, and the barrier's last packets.
QUIET_BYTES, QUIET_S, QUIET_DEADLINE_S = 20_000, 0.03, 30.0


# ---- on a rank -------------------------------------------------------------------------------------------------------


def sent_bytes() -> int:
    """What this host has sent, by the counters of its network interfaces."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    columns = {name.strip(): numbers.split() for name, _, numbers in (line.partition(":") for line in lines)}
    return sum(int(numbers[8]) for name, numbers in columns.items() if name != "lo")


def wait_until_quiet() -> None:
    """Let what an earlier turn still sends leave the link."""
    deadline_s, before = time.monotonic() + QUIET_DEADLINE_S, sent_bytes()
    while time.monotonic() < deadline_s:
        time.sleep(QUIET_S)
        now = sent_bytes()
        if now - before < QUIET_BYTES:
            return
        before = now


def steps_of(candidate: str) -> int:
    """How many steps a turn has: a whole round of a local strategy."""
    found = re.search(r"\bevery=(\d+)", candidate)
    return int(found[1]) if found else 1


def wrap(candidate: str, module: torch.nn.Module) -> torch.nn.Module:
    """A candidate's own copy of the model, which has the same seed on all ranks."""
    if candidate == NONE:
        return module
    if candidate == NATIVE:
        return DistributedDataParallel(module, init_sync=False)
    if candidate == "hierarchical":
        return psengine.DistributedDataParallel(module, collective="hierarchical", init_sync=False)
    return psengine.DistributedDataParallel(module, strategy=candidate, init_sync=False)


def turn_of(candidate: str, workload: Any) -> Turn:
    torch.manual_seed(0)
    model = wrap(candidate, workload.build())
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4)
    if isinstance(model, psengine.DistributedDataParallel):
        optimizer = psengine.DistributedOptimizer(optimizer, model)
    torch.manual_seed(1 + dist.get_rank())
    inputs, targets = workload.batch()

    def run() -> None:
        for _ in range(steps_of(candidate)):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    return Turn(run, before=wait_until_quiet)


def clock(run: Callable[[], object]) -> tuple[float, int]:
    """Seconds, and the bytes that this host has sent until its link is quiet again."""
    before = sent_bytes()
    seconds = wall_clock(run)
    wait_until_quiet()
    return seconds, sent_bytes() - before


def be_rank(plan_path: Path, out: Path) -> None:
    plan = json.loads(plan_path.read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=plan["deadline"]))
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name in plan["models"]:
        turns = {
            label: turn_of(candidate, WORKLOADS[name])
            for candidate, label in zip(plan["candidates"], labels_of(plan["candidates"]), strict=True)
        }
        shown = take_turns(turns, plan["rounds"], warm_up=plan["warm_up"], barrier=dist.barrier, clock=clock)
        found[name] = {
            label: [(seconds / steps_of(label), size / steps_of(label)) for seconds, size in values]
            for label, values in shown.items()
        }
    out.write_text(json.dumps(found))
    dist.barrier()


# ---- here ------------------------------------------------------------------------------------------------------------


def start_servers(hosts: Sequence[Host], stack: ExitStack) -> str:
    """A server of one shard on each host; returns PSENGINE_SERVERS."""
    command = [sys.executable, "-m", "psengine.cli.server", "--bind", f"tcp://0.0.0.0:{SERVER_PORT}", "--insecure"]
    started = [stack.enter_context(host.start(command, environment={"OMP_NUM_THREADS": "1"})) for host in hosts]
    for server in started:
        server.wait_until(lambda server=server: "ready" in server.stdout + server.stderr, START_S)
    return ",".join(f"tcp://{host.name}:{SERVER_PORT}" for host in hosts)


def measure(
    layout: str, rate: str, options: argparse.Namespace
) -> dict[str, tuple[dict[str, list[float]], dict[str, float]]]:
    """By model: each candidate's seconds of a step on the slowest rank, and bytes of a step from the busiest host."""
    host_count, ranks = map(int, layout.split("x"))
    world_size = host_count * ranks
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="psengine-cluster-")))
        # Hosts have a /tmp of their own; modules may be imported from this one.
        shared = [folder, *(Path(path) for path in sys.path if path.startswith("/tmp/") and Path(path).is_dir())]
        delay_s = options.round_trip_ms / 1000
        hosts = stack.enter_context(emulated_hosts(host_count, rate=rate, round_trip_s=delay_s, shared=shared))
        needs_servers = any("server" in name or name.startswith("async") for name in options.candidates)
        servers = {"PSENGINE_SERVERS": start_servers(hosts, stack)} if needs_servers else {}
        (folder / "plan").write_text(json.dumps({name: getattr(options, name) for name in PLANNED}))
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
            command = [sys.executable, __file__, "--rank", folder / "plan", folder / f"{rank}.json"]
            processes.append(stack.enter_context(hosts[rank // ranks].start(command, environment=environment)))
        _wait(processes, options.deadline)
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]
    return {model: _of_all([each[model] for each in found], ranks) for model in options.models}


PLANNED = ("candidates", "models", "rounds", "warm_up", "deadline")


def _wait(processes: Sequence[Any], deadline_s: float) -> None:
    """Until all have ended; the first that fails ends the run with its output."""
    end_s = time.monotonic() + deadline_s
    is_over = False
    while not is_over:
        is_over = not any(process.is_running for process in processes)
        if failed := [process for process in processes if not process.is_running and process.wait(1) != 0]:
            raise RuntimeError(f"a rank on {failed[0].host} failed:\n{failed[0].stdout}\n{failed[0].stderr}")
        if time.monotonic() > end_s:
            raise RuntimeError(f"ranks still run after {deadline_s:g} s: raise --deadline, or lower --rounds")
        time.sleep(0.1)


def _of_all(
    per_rank: Sequence[Mapping[str, Sequence[tuple[float, float]]]], ranks: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    seconds = slowest([{name: [turn[0] for turn in turns] for name, turns in rank.items()} for rank in per_rank])
    sizes = {
        name: max(statistics.median(turn[1] for turn in rank[name]) for rank in per_rank[::ranks])
        for name in per_rank[0]
    }
    return seconds, sizes


def main() -> None:
    parser = parser_of(__doc__, rounds=5, quick="one round at 1 Gbit/s")
    add = parser.add_argument
    add("--models", type=some_of(list(WORKLOADS)), default=("gpt", "mlp"), help="default: gpt,mlp")
    add("--layouts", default="4x1,2x2", help="hosts x ranks on each (default: %(default)s)")
    add("--rates", default="10gbit,1gbit,100mbit", help="for tc(8) (default: %(default)s)")
    add("--round-trip-ms", type=float, default=0.0, help="delay; needs rates of at most 100mbit")
    add("--warm-up", type=at_least(0), default=2, help="rounds that are not timed (default: 2)")
    add("--candidates", default=CANDIDATES, help="separated by semicolons (default: %(default)s)")
    options = parser.parse_args()
    options.candidates = options.candidates.split(";")
    if options.quick:
        options.rounds, options.rates, options.warm_up = 1, "1gbit", 1
    record = Record.begin("cluster", QUESTION, options, peers=(NATIVE,), baseline=NONE)
    if (missing := missing_for_hosts()) is not None:
        record.caveat(f"Not measured: {missing}")
        record.finish()
        return
    record.caveat(
        "Hosts are emulated: namespaces of one machine, whose cores all ranks share. So a step without exchange lasts"
        " longer than on separate hosts, and an exchange that computes takes its time from other ranks' steps."
    )
    rows = []
    for layout, rate in product(options.layouts.split(","), options.rates.split(",")):
        for model, (seconds, sizes) in measure(layout, rate, options).items():
            labels = {"model": model, "hosts x ranks": layout.replace("x", " x "), "link": rate}
            if options.round_trip_ms:
                labels["round trip"] = f"{options.round_trip_ms:g} ms"
            record.add(labels, seconds)
            rows += [[*labels.values(), name, number(size / 1e6)] for name, size in sizes.items()]
    columns = [*record.cases[0].labels, "candidate", "MB"]
    record.tables.append(Table("MB that a host sends for a step, by the counters of its interface", columns, rows))
    record.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        be_rank(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
