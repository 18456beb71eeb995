"""One rank of the benchmark, on an emulated host; ``run.py`` starts it.

python benchmarks/cluster/rank.py PLAN.json OUT.json
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.turns import Turn, labels_of, take_turns, wall_clock
from step_overhead.models import WORKLOADS

import psengine

# On a link that is quiet no more than this is sent in an interval: heartbeats, and the barrier's last packets.
QUIET_BYTES, QUIET_S, QUIET_DEADLINE_S = 20_000, 0.03, 30.0


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
    """A candidate's own copy of the model, which has the same seed on all ranks; "COLLECTIVE/STRATEGY" sets both."""
    if candidate == "none":
        return module
    if candidate.startswith("native"):
        model = DistributedDataParallel(module, init_sync=False)
        if candidate == "native-fp16":
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            model.register_comm_hook(None, fp16_compress_hook)
        return model
    collective, slash, strategy = candidate.rpartition("/")
    if not slash and candidate == "hierarchical":
        collective, strategy = "hierarchical", "sync"
    return psengine.DistributedDataParallel(module, strategy=strategy, collective=collective or "auto", init_sync=False)


def turn_of(candidate: str, workload: Any) -> tuple[Turn, int]:
    torch.manual_seed(0)
    model = wrap(candidate, workload.build())
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4)
    if isinstance(model, psengine.DistributedDataParallel):
        optimizer = psengine.DistributedOptimizer(optimizer, model)
    torch.manual_seed(1 + dist.get_rank())
    inputs, targets = workload.batch()
    steps = steps_of(candidate)

    def run() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    return Turn(run, before=wait_until_quiet), steps


def clock(run: Callable[[], object]) -> tuple[float, int]:
    """Seconds, and the bytes that this host has sent until its link is quiet again."""
    before = sent_bytes()
    seconds = wall_clock(run)
    wait_until_quiet()
    return seconds, sent_bytes() - before


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=plan["deadline_s"]))
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name in plan["models"]:
        labels = labels_of(plan["candidates"])
        turns = {}
        for candidate, label in zip(plan["candidates"], labels, strict=True):
            turns[label] = turn_of(candidate, WORKLOADS[name])
        shown = take_turns(
            {label: turn for label, (turn, _) in turns.items()},
            plan["rounds"],
            warm_up=plan["warm_up"],
            barrier=dist.barrier,
            clock=clock,
        )
        found[name] = {
            label: [(seconds / turns[label][1], size / turns[label][1]) for seconds, size in values]
            for label, values in shown.items()
        }
        dist.barrier()
    Path(sys.argv[2]).write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main()
