"""What a step with a table on servers costs, against tables in each worker and an echo of the same bytes.

python benchmarks/tables/run.py [--workers 1,2] [--ids random,zipf] [--batch 100000] [--plot docs/images/tables.png]
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from harness.command_line import at_least, numbers, parser_of, some_of
from harness.figures import Spread, number, slowest
from harness.ranks import Rank, run_ranks
from harness.record import Record
from harness.tables import Table
from harness.turns import Turn, take_turns
from server_throughput.echo import ECHO, Echo, echo_server
from support.server_process import running_server

import psengine

QUESTION = "What does a step with a table on servers cost?"
DIM, LR = 64, 0.1
ROW_BYTES = 8 + 4 * DIM  # of a message
NATIVE, DENSE, LOG = "native, sparse", "native, dense", "async log"
OURS = {"average": "average", "async": "async", LOG: "async"}  # name -> rule
CANDIDATES = (*OURS, NATIVE, DENSE, ECHO)
IDS = ("random", "zipf")
BATCHES = 4  # of each worker, again and again
SIZES = {"nn.Embedding": (10**4, 10**5, 10**6, 10**7), "ServerEmbedding": (10**4, 10**5, 10**6, 10**7, 10**8)}


def model_of(table: nn.Module) -> nn.Module:
    """A table, and hardly anything else."""
    return nn.Sequential(table, nn.Linear(DIM, 1))


def batches_of(kind: str, rows: int, batch: int, seed: int) -> list[torch.Tensor]:
    """Random ids, each once; or by Zipf's law, row k about k times as rarely as the first."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "random":
        return [torch.randperm(rows, generator=generator)[:batch] for _ in range(BATCHES)]
    chances = torch.rand(BATCHES, batch, generator=generator, dtype=torch.float64)
    return list((rows**chances).long() - 1)


# ---- on a worker -----------------------------------------------------------------------------------------------------


def wrap(name: str, rows: int, address: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    if name not in OURS:
        model = DistributedDataParallel(model_of(nn.Embedding(rows, DIM, sparse=name == NATIVE)))
        return model, torch.optim.SGD(model.parameters(), lr=LR)
    table = psengine.ServerEmbedding(rows, DIM, lr=LR, rule=OURS[name], max_staleness=None)
    os.environ["PSENGINE_SERVERS"] = address
    model = psengine.DistributedDataParallel(model_of(table))
    return model, psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LR), model)


def turn_of(name: str, rows: int, batches: list[torch.Tensor], address: str) -> Turn:
    if name == ECHO:
        echo = Echo(address)
        messages = itertools.cycle([torch.empty(len(ids.unique()), ROW_BYTES, dtype=torch.uint8) for ids in batches])
        return Turn(lambda: echo.push_pull(next(messages).chunk(2)))
    model, optimizer = wrap(name, rows, address)
    coming = itertools.cycle(batches)

    def step() -> None:
        optimizer.zero_grad()
        model(next(coming)).mean().backward()
        optimizer.step()

    return Turn(step)


def measure(
    rank: Rank, kind: str, rows: int, batch: int, rounds: int, names: list[str], addresses: dict[str, str]
) -> tuple[int, dict[str, list[float]]]:
    """Unique rows of a step of this worker, and seconds of each candidate's steps."""
    batches = batches_of(kind, rows, batch, rank.rank)
    turns = {}
    for name in names:
        # Servers tell the jobs apart.
        os.environ["PSENGINE_JOB"] = f"{name} {kind} {rank.world_size}"
        turns[name] = turn_of(name, rows, batches, addresses.get(name, addresses["memory"]))
    unique = sum(len(ids.unique()) for ids in batches) // BATCHES
    return unique, take_turns(turns, rounds, warm_up=BATCHES, barrier=rank.barrier.wait)


def begin(name: str, rows: int) -> None:
    """Print the memory and the time that a worker takes until its first step with Adagrad is done."""
    ids = torch.arange(0, rows, rows // 1000)
    psengine.DistributedOptimizer, torch.optim.Adagrad([nn.Parameter(torch.zeros(1))])  # imports what both need
    before_kb, begin_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    if name == "nn.Embedding":
        model: nn.Module = model_of(nn.Embedding(rows, DIM, sparse=True))
        optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    else:
        model = psengine.DistributedDataParallel(
            model_of(psengine.ServerEmbedding(rows, DIM, optimizer="adagrad", lr=LR)), strategy="async"
        )
        optimizer = psengine.DistributedOptimizer(torch.optim.Adagrad(model.module[1].parameters(), lr=LR), model)
    model(ids).mean().backward()
    optimizer.step()
    took_s = time.perf_counter() - begin_s
    print(json.dumps([(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / 1e3, took_s]))


# ---- here ------------------------------------------------------------------------------------------------------------


def beginnings(address: str, most: int) -> Iterator[tuple[str, int, float, float]]:
    """(what, rows, MB, seconds) of a worker's beginning, each in a process of its own."""
    for name, rows in ((name, rows) for name, sizes in SIZES.items() for rows in sizes if rows <= most):
        environment = {"PSENGINE_SERVERS": address, "PSENGINE_WORKER": "0", "PSENGINE_JOB": f"{rows} rows"}
        command = [sys.executable, __file__, "--begin", name, str(rows)]
        settings = {"OMP_NUM_THREADS": "1", **os.environ, **environment}
        done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300, check=True)
        yield name, rows, *json.loads(done.stdout)


def plot(found: list[tuple[str, int, float, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(1, 2, figsize=(9, 3.4))
    for axes, column, title in zip(grid, (2, 3), ("MB of a worker", "seconds to the first step"), strict=True):
        for name in SIZES:
            points = [(one[1], one[column]) for one in found if one[0] == name]
            axes.loglog(*zip(*points, strict=True), marker="o", label=name)
        axes.set(title=title, xlabel=f"rows of {DIM} floats, with Adagrad's state")
        axes.grid(alpha=0.3)
    grid[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = parser_of(__doc__, rounds=12, quick="3 rounds of 10,000 ids, tables of at most 100,000 rows")
    add = parser.add_argument
    add("--workers", type=numbers(1), default=(1, 2))
    add("--ids", type=some_of(IDS), default=IDS, help="comma-separated")
    add("--rows", type=at_least(1000), default=10**6, help="of the table whose step is timed (default: %(default)s)")
    add("--batch", type=at_least(1), default=100_000, help="ids of a worker's step (default: %(default)s)")
    add("--candidates", type=lambda text: text.split(";"), default=CANDIDATES, help="separated by semicolons")
    add("--plot", type=Path, metavar="PNG", help="also plot memory and start-up")
    options = parser.parse_args()
    rounds, batch = (3, 10_000) if options.quick else (options.rounds, options.batch)
    record = Record.begin("tables", QUESTION, options, peers=(NATIVE, DENSE, ECHO))
    record.caveat(f"Rows of {DIM} floats, SGD, one server of two shards; workers and server share the cores.")
    rows = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        kept = {"durability": "log", "snapshot_dir": Path(folder), "snapshot_interval_s": 0}
        addresses = {
            name: stack.enter_context(running_server(shards=2, **how)).addresses[0]
            for name, how in (("memory", {}), (LOG, kept))
        }
        addresses[ECHO] = stack.enter_context(echo_server())
        for workers, kind in itertools.product(options.workers, options.ids):
            arguments = (kind, options.rows, batch, rounds, list(options.candidates), addresses)
            found = run_ranks(measure, workers, *arguments, deadline_s=options.deadline)
            unique = sum(count for count, _ in found)
            seconds = slowest([each for _, each in found])
            labels = {"workers": workers, "ids": kind, "unique rows": unique}
            record.add(labels, seconds)
            rows += [
                [*labels.values(), name, number(unique / Spread.of(each).median / 1e6)]
                for name, each in seconds.items()
            ]
        record.tables.append(
            Table("Million rows a second", ["workers", "ids", "rows of a step", "candidate", ""], rows)
        )
        sizes = list(beginnings(addresses["memory"], 10**5 if options.quick else 10**8))
    columns = ["", "rows", "MB of a worker", "seconds to its first step"]
    cells = [[name, f"{count:,}", number(mb), number(took_s)] for name, count, mb, took_s in sizes]
    record.tables.append(Table("With Adagrad; a first step of 1,000 rows", columns, cells))
    if options.plot is not None:
        plot(sizes, options.plot)
    record.finish()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--begin"]:
        begin(sys.argv[2], int(sys.argv[3]))
    else:
        main()
