"""How costs grow: with workers, shards, megabytes and parameters; cost against size, with the fitted exponent.

python benchmarks/growth/run.py [--quick] [--questions shards,parameters] [--png FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from all_reduce.run import COPY, GLOO, NO_MPI
from all_reduce.run import measure_on_ranks as sums
from harness.command_line import parser_of, some_of
from harness.figures import exponent, number
from harness.pictures import growth_curves
from harness.ranks import find_mpiexec
from harness.record import Record
from harness.tables import Table
from server_throughput.echo import ECHO, WORKING_ECHO
from server_throughput.run import measure as push_pull
from server_throughput.run import servers
from step_overhead.run import NATIVE, PLAIN
from step_overhead.run import measure_on_ranks as steps

QUESTION = "How do costs grow with workers, shards, megabytes and parameters?"
AXIS = "size"
PUSHING = ("async", "sync-server", ECHO, WORKING_ECHO)
EXCHANGING = (PLAIN, NATIVE, "psengine", "psengine-views")
SUM_MB, PUSH_MB = 4, 25
Seconds = dict[str, list[float]]


@dataclass(frozen=True)
class Budget:
    rounds: int
    deadline_s: float
    is_quick: bool

    def of(self, *sizes: int) -> tuple[int, ...]:
        """The sizes, or the two smallest."""
        return sizes[:2] if self.is_quick else sizes


def sums_of_sizes(budget: Budget) -> Iterator[tuple[int, Seconds]]:
    sizes_mb = budget.of(1, 5, 25, 100, 200)
    found = sums(2, [1024 * size for size in sizes_mb], budget.rounds, budget.deadline_s, find_mpiexec())
    yield from zip(sizes_mb, map(without_copy, found), strict=True)


def sums_of_ranks(budget: Budget) -> Iterator[tuple[int, Seconds]]:
    for ranks in budget.of(2, 4, 8):
        # MPI spins where ranks share cores: eight of them on two cores would measure the scheduler.
        (found,) = sums(ranks, [1024 * SUM_MB], budget.rounds, budget.deadline_s, None)
        yield ranks, without_copy(found)


def without_copy(seconds: Seconds) -> Seconds:
    return {name: own for name, own in seconds.items() if name != COPY}


def steps_of_workers(budget: Budget) -> Iterator[tuple[int, Seconds]]:
    for workers in budget.of(1, 2, 4, 8):
        yield workers, steps("mlp", workers, EXCHANGING, budget.rounds, budget.deadline_s)


def steps_of_parameters(ranks: int) -> Callable[[Budget], Iterator[tuple[int, Seconds]]]:
    def measure(budget: Budget) -> Iterator[tuple[int, Seconds]]:
        for parameters in budget.of(10, 100, 1000, 5000):
            yield parameters, steps(f"small:{parameters}", ranks, EXCHANGING, 2 * budget.rounds, budget.deadline_s)

    return measure


def pushes_of_sizes(budget: Budget) -> Iterator[tuple[int, Seconds]]:
    with servers(PUSHING) as addresses:
        for size_mb in budget.of(1, 5, 25, 100, 200):
            yield size_mb, push_pull(PUSHING, 1, size_mb, budget.rounds, "SGD", addresses, budget.deadline_s)


def pushes_of_workers(budget: Budget) -> Iterator[tuple[int, Seconds]]:
    with servers(PUSHING) as addresses:
        for workers in budget.of(1, 2, 4, 8):
            yield workers, push_pull(PUSHING, workers, PUSH_MB, budget.rounds, "SGD", addresses, budget.deadline_s)


def pushes_of_shards(budget: Budget) -> Iterator[tuple[int, Seconds]]:
    for shards in budget.of(1, 2, 4):
        names = ("async", "sync-server")
        with servers(names, shards) as addresses:
            yield shards, push_pull(names, 2, PUSH_MB, budget.rounds, "SGD", addresses, budget.deadline_s)


QUESTIONS: dict[str, tuple[str, Callable[[Budget], Iterator[tuple[int, Seconds]]]]] = {
    "sum-megabytes": ("a sum over 2 ranks, against MB", sums_of_sizes),
    "sum-ranks": (f"a sum of {SUM_MB} MB, against ranks", sums_of_ranks),
    "step-workers": ("what exchange adds to a step of the MLP, against ranks", steps_of_workers),
    "parameters": ("what exchange adds on 1 rank, against parameters", steps_of_parameters(1)),
    "parameters-2": ("what exchange adds on 2 ranks, against parameters", steps_of_parameters(2)),
    "megabytes": ("push and pull of 1 worker, against MB", pushes_of_sizes),
    "workers": (f"push and pull of {PUSH_MB} MB, against workers", pushes_of_workers),
    "shards": (f"push and pull of {PUSH_MB} MB, 2 workers, against shards", pushes_of_shards),
}


def exponents_of(record: Record) -> Table:
    rows = []
    for (question, candidate), points in growth_curves(record).items():
        sizes, costs = zip(*points, strict=True)
        fitted = number(exponent(sizes, costs)) if len(points) > 1 else "-"
        rows.append([question, candidate, fitted, f"{sizes[0]}-{sizes[-1]}"])
    return Table("cost = c * size^p", ["question", "candidate", "p", "sizes"], rows)


def main() -> None:
    parser = parser_of(__doc__, rounds=6, quick="2 rounds of the two smallest sizes")
    parser.add_argument("--questions", type=some_of(list(QUESTIONS)), default=tuple(QUESTIONS), help="comma-separated")
    options = parser.parse_args()
    budget = Budget(2 if options.quick else options.rounds, options.deadline, options.quick)
    record = Record.begin(
        "growth", QUESTION, options, peers=(NATIVE, GLOO, ECHO, WORKING_ECHO), baseline=PLAIN, axis=AXIS
    )
    cores = record.machine["cores"]
    record.caveat(
        f"Workers and shards share {cores} cores: beyond {cores} of them a cost is at least that of the cores, so 8"
        " workers show what contention adds, not what 8 machines would."
    )
    if find_mpiexec() is None:
        record.caveat(NO_MPI)
    for name in options.questions:
        question, measure = QUESTIONS[name]
        for size, seconds in measure(budget):
            record.add({"question": question, AXIS: size}, seconds)
            print(f"{question}: {size}", flush=True)
    record.tables.append(exponents_of(record))
    record.finish()


if __name__ == "__main__":
    main()
