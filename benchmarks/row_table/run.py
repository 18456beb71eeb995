"""What a server's table takes to gather and to step rows, against torch on a dense tensor of the same rows.

python benchmarks/row_table/run.py [--rows 1000000] [--dim 64] [--batch 100000] [--rounds 15] [--quick]
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.command_line import at_least, parser_of
from harness.record import Record
from harness.turns import Turn, take_turns

from psengine.kernels.row_table import RowTable

OURS, TORCH = "psengine", "torch"
LR = 0.1


class Batch:
    """Unique ids, ascending, and their gradient: each ``choose`` takes the next of eight."""

    def __init__(self, kind: str, weight: torch.nn.Parameter, size: int) -> None:
        rows, dim = weight.shape
        self.weight, self.out, generator = weight, torch.ones(size, dim), numpy.random.default_rng(0)
        drawn = [torch.from_numpy(generator.zipf(1.05, 4 * size) - 1) % rows for _ in range(8)]
        if kind == "random":
            drawn = [torch.from_numpy(generator.permutation(rows)) for _ in range(8)]
        every = [ids[:size].unique() for ids in drawn]
        self.size, self.batches = sum(map(len, every)) / 8, itertools.cycle(every)

    def choose(self) -> None:
        self.ids = next(self.batches)
        values = self.values = self.out[: len(self.ids)]
        with torch.sparse.check_sparse_tensor_invariants(False):
            self.weight.grad = torch.sparse_coo_tensor(self.ids[None], values, self.weight.shape, is_coalesced=True)


def main() -> None:
    parser = parser_of(__doc__, rounds=15, quick="3 rounds and 100,000 rows")
    parser.add_argument("--rows", type=at_least(1), default=1_000_000, help="of the table (default: %(default)s)")
    parser.add_argument("--dim", type=at_least(1), default=64, help="floats of a row (default: %(default)s)")
    parser.add_argument("--batch", type=at_least(1), default=100_000, help="uses of rows (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds, rows = (min(3, options.rounds), 100_000) if options.quick else (options.rounds, options.rows)
    question = "How fast does a server's table gather and step rows, against torch on a dense tensor?"
    record, stamps = Record.begin("row_table", question, options, peers=(TORCH,)), itertools.count(1)
    for optimizer in ("sgd", "adagrad"):
        table = RowTable(options.dim, optimizer=optimizer, eps=1e-10, seed=0, number=0, std=1.0)
        for ids in torch.arange(rows).split(100_000):
            table.step(ids, torch.ones(len(ids), options.dim), LR, 0)
        weight = torch.nn.Parameter(torch.ones(rows, options.dim))
        native = (torch.optim.SGD if optimizer == "sgd" else torch.optim.Adagrad)([weight], lr=LR)
        for kind, call in itertools.product(("random", "zipf"), ("gather", "step")):
            batch = Batch(kind, weight, min(options.batch, rows))
            runs = {
                TORCH: lambda b=batch: torch.index_select(b.weight.detach(), 0, b.ids, out=b.values),
                OURS: lambda b=batch, t=table: t.gather(b.ids, b.values),
            }
            if call == "step":
                runs = {
                    TORCH: native.step,
                    OURS: lambda b=batch, t=table: t.step(b.ids, b.values, LR, next(stamps)),
                }
            turns = {name: Turn(run, batch.choose) for name, run in runs.items()}
            labels = {"optimizer": optimizer, "ids": kind, "call": call, "rows": round(batch.size)}
            record.add(labels, take_turns(turns, rounds, warm_up=2))
    record.finish()


if __name__ == "__main__":
    main()
