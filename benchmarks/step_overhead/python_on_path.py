"""What of a step is Python: calls and microseconds for each step, bucket and parameter.

python benchmarks/step_overhead/python_on_path.py [--candidates sync,async] [--rounds 40]

Steps of models with different numbers of parameters and buckets are counted and timed, less those of the bare model. A
least-squares fit divides the rest into so much for each step, bucket, small parameter and large parameter.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.command_line import parser_of, some_of
from harness.ranks import Rank, run_ranks
from harness.tables import Table
from harness.turns import Turn, take_turns

import psengine
from psengine.parameter_server.client.embedded import EmbeddedServer

WARM_UP_ROUNDS = 14  # after ten the backward timer samples one step in a hundred, and hooks only count
PLAIN = "plain"
CANDIDATES: dict[str, dict[str, Any]] = {
    "sync": {},
    "sync, views": {"gradient_as_bucket_view": True},
    "sync, static graph": {"static_graph": True},
    "sync over gloo": {"collective": "c10d"},
    "sync-server": {"strategy": "sync-server"},
    "async": {"strategy": "async"},
}
UNITS = ("step", "bucket", "small parameter", "large parameter")


@dataclass(frozen=True)
class Shape:
    """A model: small parameters have 64 elements, large ones 64 KiB; ``cap_mb`` limits its buckets."""

    small: int
    large: int
    cap_mb: float


SHAPES = (Shape(100, 0, 25), Shape(400, 0, 25), Shape(400, 0, 0.005), Shape(100, 24, 25), Shape(100, 24, 0.2))


class Scaled(nn.Module):
    """Each parameter scales the value that it gets: as little arithmetic as a parameter can have."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        sizes = [64] * shape.small + [16 * 1024] * shape.large
        self.weights = nn.ParameterList(torch.ones(size) for size in sizes)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            value = value + weight[:1] * weight.numel() if weight.numel() > 64 else value * weight[0]
        return value


def measure(rank: Rank, names: Sequence[str], rounds: int) -> dict[str, list[list[float]]]:
    """For each candidate, and shape: buckets, calls of Python functions, of C functions, microseconds; of this rank."""
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    for shape in SHAPES:
        steps, buckets = {PLAIN: _step_of(Scaled(shape))}, {PLAIN: 0}
        for name in names:
            model = psengine.DistributedDataParallel(Scaled(shape), bucket_cap_mb=shape.cap_mb, **CANDIDATES[name])
            steps[name] = _step_of(model, updates="async" in name)
            for _ in range(3):
                steps[name]()  # buckets are laid out anew before the second one, or the third
            buckets[name] = len(model.reducer.buckets)
        turns = {name: Turn(step) for name, step in steps.items()}
        seconds = take_turns(turns, rounds, warm_up=WARM_UP_ROUNDS, barrier=rank.barrier.wait, clock=_thread_clock)
        rank.barrier.wait()
        calls = {name: _count_calls(step) for name, step in steps.items()}
        for name in names:
            added_us = (min(seconds[name]) - min(seconds[PLAIN])) * 1e6
            counts = [own - plain for own, plain in zip(calls[name], calls[PLAIN], strict=True)]
            found[name].append([buckets[name], *counts, added_us])
    return found


def _step_of(model: nn.Module, *, updates: bool = False) -> Callable[[], None]:
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model) if updates else None
    value = torch.ones(1)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(value).sum().backward()
        if optimizer is not None:
            optimizer.step()

    return step


def _thread_clock(run: Callable[[], object]) -> float:
    """CPU time of this thread: waits that sleep, and other threads, do not count."""
    begin_s = time.thread_time()
    run()
    return time.thread_time() - begin_s


def _count_calls(step: Callable[[], object]) -> tuple[int, int]:
    """Calls of Python and of C functions in this thread."""
    counts = {"call": 0, "c_call": 0}

    def count(_frame: object, event: str, _argument: object) -> None:
        if event in counts:
            counts[event] += 1

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return counts["call"], counts["c_call"]


def _fit(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    """By unit: Python calls, C calls, microseconds."""
    amounts = [[1.0, row[0], shape.small, shape.large] for shape, row in zip(SHAPES, rows, strict=True)]
    solution = torch.linalg.lstsq(torch.tensor(amounts).double(), torch.tensor([row[1:] for row in rows]).double())
    return solution.solution


def main() -> None:
    parser = parser_of(__doc__, rounds=40, quick="10 rounds")
    parser.add_argument(
        "--candidates", type=some_of(list(CANDIDATES)), default=tuple(CANDIDATES), help="separated by commas"
    )
    options = parser.parse_args()
    rounds = min(10, options.rounds) if options.quick else options.rounds
    with EmbeddedServer.start() as server:
        environment = {"PSENGINE_SERVERS": ",".join(server.addresses)}
        run = partial(run_ranks, measure, 2, deadline_s=options.deadline, environment=environment)
        found = run(list(options.candidates), rounds)[0]
    rows = []
    for name, measured in found.items():
        by_unit = _fit(measured).tolist()
        rows.append([name, *(f"{py:.0f} + {c:.0f}, {us:.1f} µs" for py, c, us in by_unit)])
    Table("", ["Python + C calls, CPU time of", *UNITS], rows).show()


if __name__ == "__main__":
    main()
