"""What the batch size does to accuracy and time: one table and one plot, the same on every run with the same seeds.

python examples/batch_size_study.py                                          one process
psengine run --workers 2 examples/batch_size_study.py                        two, sharing each batch
psengine run --workers 2 examples/batch_size_study.py --scaling none         the same learning rate for all sizes
psengine run --workers 2 examples/batch_size_study.py --data DIR             Fashion-MNIST, as IDX files

Every size trains for the same number of epochs, from the same weights. The learning rate belongs to the first size; for
the others it grows with the size ("linear", Goyal et al. 2017, https://arxiv.org/abs/1706.02677), with its root
("sqrt"), or not at all ("none").
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from compare_strategies import evaluate, train
from image_data import load_data
from image_network import ImageClassifier
from image_options import OptionParser, positive_float, positive_int
from rank_errors import UserError, on_all_ranks, run_to_the_end
from rich import box
from rich.console import Console
from rich.table import Table

import psengine

SCALINGS = {"linear": lambda ratio: ratio, "sqrt": lambda ratio: ratio**0.5, "none": lambda ratio: 1.0}


@dataclass
class Row:
    """One batch size.

    Attributes:
        batch_size: images of a step, over all workers.
        steps: optimizer steps of a run.
        accuracies, seconds: of each run, one for each seed.
    """

    batch_size: int
    learning_rate: float
    steps: int
    accuracies: list[float]
    seconds: list[float]


def main() -> int:
    return run_to_the_end(study_and_report)


def study_and_report() -> int:
    options = parse_options()
    context = psengine.init()
    rows = study(options, context)
    if context.rank == 0:
        print_table(rows, options)
        plot(rows, options.plot)
        print(f"plot: {options.plot}")
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


def parse_options() -> argparse.Namespace:
    parser = OptionParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="MNIST-like images as IDX files (default: scikit-learn's digits)")
    add("--batch-sizes", default="16,32,64,128,256,512", metavar="N,N", help="of all workers together")
    add("--learning-rate", type=positive_float, default=0.02, metavar="X", help="of the first size (default: 0.02)")
    add("--scaling", choices=tuple(SCALINGS), default="linear", help="of the learning rate (default: linear)")
    add("--strategy", default="sync", metavar="NAME", help="or 'native DDP' (default: sync)")
    add("--epochs", type=positive_int, default=5, metavar="N", help="default: 5")
    add("--runs", type=positive_int, default=3, metavar="N", help="seeds for each size (default: 3)")
    add("--plot", type=Path, default=Path("runs/batch_sizes.png"), metavar="PATH", help="default: runs/batch_sizes.png")
    add("--json", type=Path, metavar="PATH", help="write the numbers there")
    options = parser.parse_args()
    options.slow_ms = 0.0
    try:
        options.batch_sizes = [positive_int(text) for text in options.batch_sizes.split(",")]
    except argparse.ArgumentTypeError as error:
        parser.error(f"--batch-sizes: {error}")
    return options


def study(options: argparse.Namespace, context: psengine.Context) -> list[Row]:
    data = on_all_ranks(lambda: load_data(options.data))
    for size in options.batch_sizes:
        if size % context.world_size or size > len(data.train):
            raise UserError(
                f"--batch-sizes: workers share each batch evenly (expected multiples of {context.world_size}, at most"
                f" {len(data.train)}; got {size})"
            )
    rows = []
    for position, size in enumerate([options.batch_sizes[0], *options.batch_sizes]):
        run = copy.copy(options)
        run.batch_size = size // context.world_size
        run.learning_rate = options.learning_rate * SCALINGS[options.scaling](size / options.batch_sizes[0])
        row = Row(size, run.learning_rate, 0, [], [])
        for run.seed in range(options.runs if position else 1):
            torch.manual_seed(run.seed)
            network = ImageClassifier(data.classes)
            outcome = train(options.strategy, copy.deepcopy(network).to(context.device), data, run, context)
            row.steps = len(outcome.losses[0])
            row.seconds.append(outcome.seconds)
            row.accuracies.append(evaluate(outcome.state, network.to(context.device), data, context))
        if position:  # the first was a warm-up: a process's first steps find libraries to load and memory to get
            rows.append(row)
            if context.rank == 0:
                print(f"batch size {size}: accuracy {statistics.median(row.accuracies):.2%}", flush=True)
    return rows


def print_table(rows: list[Row], options: argparse.Namespace) -> None:
    table = Table(title=f"{options.epochs} epochs; medians of {options.runs} runs", box=box.SIMPLE_HEAD)
    for heading in ("batch size", "learning rate", "steps", "accuracy", "(lowest-highest)", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.batch_size),
            f"{row.learning_rate:.3g}",
            str(row.steps),
            f"{statistics.median(row.accuracies):.2%}",
            f"{min(row.accuracies):.1%}-{max(row.accuracies):.1%}",
            f"{statistics.median(row.seconds):.2f}",
        )
    Console().print(table)


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, (accuracy_axes, time_axes) = pyplot.subplots(1, 2, figsize=(10, 4))
    sizes = [row.batch_size for row in rows]
    medians = [statistics.median(row.accuracies) for row in rows]
    spread = [[m - min(r.accuracies) for m, r in zip(medians, rows, strict=True)],
              [max(r.accuracies) - m for m, r in zip(medians, rows, strict=True)]]  # fmt: skip
    accuracy_axes.errorbar(sizes, medians, yerr=spread, marker="o", capsize=3)
    accuracy_axes.set_ylabel("test accuracy: median, lowest, highest")
    time_axes.plot(sizes, [statistics.median(row.seconds) for row in rows], marker="o")
    time_axes.set_ylabel("seconds for all epochs")
    for axes in (accuracy_axes, time_axes):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xlabel("batch size, over all workers")
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    exit_code = main()
    psengine.shutdown()
    sys.exit(exit_code)
