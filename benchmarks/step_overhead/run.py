"""What a training step costs under each way of exchanging gradients, all measured in turn within one run.

python benchmarks/step_overhead/run.py [--quick] [--models mlp,gpt] [--candidates plain,native,psengine] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # ranks import this file under another name

from machine import describe_machine, run_ranks
from models import WORKLOADS

WARM_UP_STEPS = 5  # buckets are rebuilt before the second forward


def _psengine(module: nn.Module, **options: Any) -> nn.Module:
    import psengine

    return psengine.DistributedDataParallel(module, **options)


# name -> wrap(module). "plain" exchanges nothing and ends with a barrier; overheads are measured against it.
CANDIDATES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda module: module,
    "native": DistributedDataParallel,
    "psengine": _psengine,
    "psengine-gloo": partial(_psengine, collective="c10d"),
    "native-views": partial(DistributedDataParallel, gradient_as_bucket_view=True),
    "psengine-views": partial(_psengine, gradient_as_bucket_view=True),
}
# Whose step and overhead a candidate's are divided by; the others' is native.
RATIO_TO = {"psengine-views": "native-views"}


@dataclass(frozen=True)
class Plan:
    """What one rank measures; ``candidates`` may repeat a name, which measures the noise."""

    workload: str
    candidates: tuple[str, ...]
    repetitions: int
    optimizer: bool


@dataclass(frozen=True)
class Row:
    """Milliseconds over the repetitions; ``ratio`` fields are relative to the candidate named in ``ratio_to``."""

    workload: str
    candidate: str
    world_size: int
    repetitions: int
    parameters: int
    step_ms: float
    step_10th_ms: float
    step_90th_ms: float
    overhead_ms: float | None
    overhead_10th_ms: float | None
    overhead_90th_ms: float | None
    overhead_us_per_parameter: float | None
    ratio_to: str | None
    step_ratio: float | None
    overhead_ratio: float | None


def labels_of(candidates: Sequence[str]) -> list[str]:
    """Unique names: the second "native" is "native#2"."""
    labels: list[str] = []
    for index, name in enumerate(candidates):
        earlier = candidates[:index].count(name)
        labels.append(f"{name}#{earlier + 1}" if earlier else name)
    return labels


def measure(rank: int, plan: Plan) -> tuple[int, list[list[float]]]:
    """Return the number of parameter tensors and, for each candidate, this rank's seconds for each repetition."""
    torch.set_num_threads(1)
    workload = WORKLOADS[plan.workload]
    torch.manual_seed(0)
    models = [CANDIDATES[name](workload.build()) for name in plan.candidates]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9) for model in models]
    torch.manual_seed(1 + rank)
    inputs, targets = workload.batch()
    is_plain = [name == "plain" for name in plan.candidates]
    barrier = _cheap_barrier()

    def step(index: int) -> float:
        barrier()
        begin = time.perf_counter()
        models[index].zero_grad(set_to_none=True)
        F.cross_entropy(models[index](inputs), targets).backward()
        if is_plain[index]:
            barrier()
        duration = time.perf_counter() - begin
        if plan.optimizer:
            optimizers[index].step()
        return duration

    count = len(models)
    for _ in range(WARM_UP_STEPS):
        for index in range(count):
            step(index)
    seconds: list[list[float]] = [[] for _ in models]
    gc.collect()
    gc.disable()
    for repetition in range(plan.repetitions):
        # Rotate who begins and who follows whom: nobody always meets the caches as the same neighbour left them.
        order = [(repetition + turn) % count for turn in range(count)]
        for index in order if repetition // count % 2 == 0 else reversed(order):
            seconds[index].append(step(index))
    gc.enable()
    return len(list(models[0].parameters())), seconds


def _cheap_barrier() -> Callable[[], None]:
    """Microseconds in shared memory where it can be had; gloo's, half a millisecond, would count as plain's."""
    from psengine.collectives.registry import collective_for, default_group

    collective = collective_for(default_group(), "auto")
    collective.connect()
    return lambda: collective.barrier().wait()


def measure_on_ranks(
    workload: str, candidates: tuple[str, ...], repetitions: int, optimizer: bool, deadline_s: float
) -> tuple[int, list[list[float]]]:
    """Return the number of parameters and, per candidate and repetition, the seconds of the slowest rank."""
    plan = Plan(workload, candidates, repetitions, optimizer)
    results = run_ranks(measure, WORKLOADS[workload].world_size, plan, deadline_s=deadline_s)
    per_rank = [seconds for _, seconds in results]
    slowest = [[max(ranks) for ranks in zip(*candidate, strict=True)] for candidate in zip(*per_rank, strict=True)]
    return results[0][0], slowest


def summarise(workload: str, candidates: Sequence[str], parameters: int, seconds: list[list[float]]) -> list[Row]:
    """Reduce repetitions to a row per candidate; differences and ratios are taken within a repetition first."""
    plain = seconds[candidates.index("plain")] if "plain" in candidates else None
    overheads = [None if plain is None else [s - p for s, p in zip(own, plain, strict=True)] for own in seconds]
    rows = []
    for index, (name, label) in enumerate(zip(candidates, labels_of(candidates), strict=True)):
        own, overhead = seconds[index], overheads[index] if name != "plain" else None
        reference = RATIO_TO.get(name, "native")
        if name == "plain" or reference not in candidates or candidates.index(reference) == index:
            reference = None
        step_ratio = overhead_ratio = None
        if reference is not None:
            other = candidates.index(reference)
            step_ratio = statistics.median(s / o for s, o in zip(own, seconds[other], strict=True))
            if overhead is not None:
                overhead_ratio = statistics.median(overhead) / statistics.median(overheads[other] or [])
        rows.append(
            Row(
                workload=workload,
                candidate=label,
                world_size=WORKLOADS[workload].world_size,
                repetitions=len(own),
                parameters=parameters,
                step_ms=1e3 * statistics.median(own),
                step_10th_ms=1e3 * _quantile(own, 0.1),
                step_90th_ms=1e3 * _quantile(own, 0.9),
                overhead_ms=None if overhead is None else 1e3 * statistics.median(overhead),
                overhead_10th_ms=None if overhead is None else 1e3 * _quantile(overhead, 0.1),
                overhead_90th_ms=None if overhead is None else 1e3 * _quantile(overhead, 0.9),
                overhead_us_per_parameter=None if overhead is None else 1e6 * statistics.median(overhead) / parameters,
                ratio_to=reference,
                step_ratio=step_ratio,
                overhead_ratio=overhead_ratio,
            )
        )
    return rows


def _quantile(values: list[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[round(fraction * (len(ordered) - 1))]


def table_of(rows: list[Row]) -> str:
    """Format as Markdown, one table per workload."""
    lines: list[str] = []
    for workload in dict.fromkeys(row.workload for row in rows):
        own = [row for row in rows if row.workload == workload]
        ranks = "1 rank" if own[0].world_size == 1 else f"{own[0].world_size} ranks"
        lines += [
            f"**{WORKLOADS[workload].what}**; {ranks}, {own[0].repetitions} repetitions",
            "",
            "| candidate | step, ms (10th-90th) | overhead, ms (10th-90th) | µs/parameter | of step | of overhead |",
            "|---|---|---|---|---|---|",
        ]
        for row in own:
            step = f"{row.step_ms:.2f} ({row.step_10th_ms:.2f}-{row.step_90th_ms:.2f})"
            overhead = per_parameter = ratio = overhead_ratio = "-"
            if row.overhead_ms is not None:
                overhead = f"{row.overhead_ms:.2f} ({row.overhead_10th_ms:.2f}-{row.overhead_90th_ms:.2f})"
                per_parameter = f"{row.overhead_us_per_parameter:.1f}"
            if row.step_ratio is not None:
                ratio = f"{row.step_ratio:.3f} of {row.ratio_to}"
            if row.overhead_ratio is not None:
                overhead_ratio = f"{row.overhead_ratio:.2f}"
            lines.append(f"| {row.candidate} | {step} | {overhead} | {per_parameter} | {ratio} | {overhead_ratio} |")
        lines.append("")
    return "\n".join(lines)


def names(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        unknown = [name for name in chosen if name not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)} (expected some of {', '.join(allowed)})")
        return chosen

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=names(list(WORKLOADS)), default=tuple(WORKLOADS), help="comma-separated")
    parser.add_argument(
        "--candidates",
        type=names(list(CANDIDATES)),
        default=tuple(CANDIDATES),
        help="comma-separated; a name given twice is measured twice, which shows the noise",
    )
    parser.add_argument("--repetitions", type=int, default=100, help="steps of each candidate (default: %(default)s)")
    parser.add_argument("--optimizer-step", action="store_true", help="run an SGD step after each step, not timed")
    parser.add_argument("--quick", action="store_true", help="10 repetitions: under a minute, and noisy")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument("--deadline", type=float, default=600, metavar="S", help="seconds one model may take")
    options = parser.parse_args()
    repetitions = 10 if options.quick else options.repetitions

    description = describe_machine("gloo over loopback", "one thread per rank")
    print(f"{description}\n", flush=True)
    rows: list[Row] = []
    for workload in options.models:
        parameters, seconds = measure_on_ranks(
            workload, options.candidates, repetitions, options.optimizer_step, options.deadline
        )
        own = summarise(workload, options.candidates, parameters, seconds)
        print(table_of(own), flush=True)
        rows += own
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": description, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
