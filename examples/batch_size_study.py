"""What the batch size does to accuracy and time: one table and one plot.

python examples/batch_size_study.py                                          one process
psengine run --workers 2 examples/batch_size_study.py                        two, sharing each batch
psengine run --workers 2 examples/batch_size_study.py --scaling none         the same learning rate for all sizes
psengine run --workers 2 examples/batch_size_study.py --data DIR             Fashion-MNIST, as IDX files

Every size trains a perceptron (784-256-10 for images of 28x28) for the same number of epochs, from the same weights, by
SGD with momentum 0.9. The learning rate belongs to the first size; for the others it grows with the size ("linear",
Goyal et al. 2017, https://arxiv.org/abs/1706.02677), with its root ("sqrt"), or not at all ("none"). The same seeds and
the same number of workers give bitwise the same accuracies.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from image_accuracy import evaluate
from image_data import Data, load_data
from image_network import ImagePerceptron
from image_options import OptionParser, fraction, positive_float, positive_int
from rank_errors import UserError, on_all_ranks, run_to_the_end
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import psengine

NATIVE = "native DDP"
MOMENTUM = 0.9
SCALINGS = {"linear": lambda ratio: ratio, "sqrt": lambda ratio: ratio**0.5, "none": lambda ratio: 1.0}


@dataclass
class Row:
    """One batch size.

    Attributes:
        batch_size: images of a step, over all workers.
        steps: optimizer steps of an epoch.
        accuracies: of each run (one for each seed), of the test images after each epoch.
        epoch_s: of each run, seconds that an epoch took, without its evaluation: the median of its epochs.
    """

    batch_size: int
    learning_rate: float
    steps: int
    accuracies: list[list[float]] = field(default_factory=list)
    epoch_s: list[float] = field(default_factory=list)

    @property
    def curve(self) -> list[float]:
        """After each epoch the median over runs."""
        return [statistics.median(column) for column in zip(*self.accuracies, strict=True)]

    @property
    def seconds(self) -> float:
        """For an epoch: the median over runs."""
        return statistics.median(self.epoch_s)

    def epochs_to(self, accuracy: float) -> int | None:
        """After how many epochs the curve first has ``accuracy``; None: after none of them."""
        return next((epoch for epoch, reached in enumerate(self.curve, 1) if reached >= accuracy), None)


def main() -> int:
    return run_to_the_end(study_and_report)


def study_and_report() -> int:
    options = parse_options()
    context = psengine.init()
    rows = study(options, context)
    if context.rank == 0:
        target = options.part_of_best * max(max(row.curve) for row in rows)
        print_table(rows, target, options)
        plot(rows, target, options.plot)
        print(f"plot: {options.plot}")
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


def parse_options() -> argparse.Namespace:
    parser = OptionParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="MNIST-like images as IDX files (default: scikit-learn's digits)")
    add("--batch-sizes", default="16,32,64,128,256,512", metavar="N,N", help="of all workers together")
    add("--learning-rate", type=positive_float, default=0.005, metavar="X", help="of the first size (default: 0.005)")
    add("--scaling", choices=tuple(SCALINGS), default="linear", help="of the learning rate (default: linear)")
    add("--strategy", default="sync", metavar="NAME", help=f"or '{NATIVE}' (default: sync)")
    add("--epochs", type=positive_int, default=20, metavar="N", help="default: 20")
    add("--runs", type=positive_int, default=3, metavar="N", help="seeds for each size (default: 3)")
    add("--part-of-best", type=fraction, default=0.99, metavar="X", help="how near the best accuracy (default: 0.99)")
    add("--plot", type=Path, default=Path("runs/batch_sizes.png"), metavar="PATH", help="default: runs/batch_sizes.png")
    add("--json", type=Path, metavar="PATH", help="write the numbers there")
    options = parser.parse_args()
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
    for size in options.batch_sizes:
        ratio = size / options.batch_sizes[0]
        rows.append(Row(size, options.learning_rate * SCALINGS[options.scaling](ratio), len(data.train) // size))
    # A process's first steps find libraries to load and memory to get; no size's time should have them in it.
    train(copy.deepcopy(rows[0]), 0, data, options, context, epochs=1)
    # Run by run, not size by size: what else the machine does then slows all sizes alike.
    for seed in range(options.runs):
        for row in rows:
            train(row, seed, data, options, context, epochs=options.epochs)
            if context.rank == 0:
                print(f"run {seed + 1}, batch size {row.batch_size}: accuracy {row.accuracies[-1][-1]:.2%}", flush=True)
    return rows


def train(
    row: Row, seed: int, data: Data, options: argparse.Namespace, context: psengine.Context, *, epochs: int
) -> None:
    """Train with one seed, and add the run to ``row``."""
    torch.manual_seed(seed)
    network = ImagePerceptron(data.train.tensors[0][0].numel(), data.classes).to(context.device)
    model, optimizer = on_all_ranks(lambda: wrap(options.strategy, network, row.learning_rate))
    sampler = DistributedSampler(data.train, context.world_size, context.rank, seed=seed)
    batches = BatchSampler(sampler, row.batch_size // context.world_size, drop_last=True)
    loader = DataLoader(data.train, sampler=batches, batch_size=None)
    accuracies, seconds = [], []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        dist.barrier()
        started_s = time.monotonic()
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images.to(context.device)), labels.to(context.device)).backward()
            optimizer.step()
        if context.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(max(psengine.gather(time.monotonic() - started_s)))
        accuracies.append(evaluate(model.module, data, context))
    row.accuracies.append(accuracies)
    row.epoch_s.append(statistics.median(seconds))
    dist.barrier()  # the strategy of rank 0 may keep the server that all others still talk to
    if isinstance(model, psengine.DistributedDataParallel):
        model.leave()


def wrap(
    strategy: str, network: nn.Module, learning_rate: float
) -> tuple[nn.parallel.DistributedDataParallel, torch.optim.Optimizer]:
    if strategy == NATIVE:
        model = nn.parallel.DistributedDataParallel(network)
        return model, torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=MOMENTUM)
    model = psengine.DistributedDataParallel(network, strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=MOMENTUM)
    return model, psengine.DistributedOptimizer(optimizer, model)


def print_table(rows: list[Row], target: float, options: argparse.Namespace) -> None:
    table = Table(
        title=f"{options.epochs} epochs, medians of {options.runs} runs; target: {target:.2%},"
        f" {options.part_of_best:g} of the best",
        box=box.SIMPLE_HEAD,
    )
    headings = ("batch", "rate", "s/epoch", "epochs to it", "s to it", "accuracy", "(range)")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        epochs = row.epochs_to(target)
        finals = [accuracies[-1] for accuracies in row.accuracies]
        table.add_row(
            str(row.batch_size),
            f"{row.learning_rate:.3g}",
            f"{row.seconds:.2f}",
            "-" if epochs is None else str(epochs),
            "-" if epochs is None else f"{epochs * row.seconds:.1f}",
            f"{row.curve[-1]:.2%}",
            f"{min(finals):.1%}-{max(finals):.1%}",
        )
    Console().print(table)


def plot(rows: list[Row], target: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, (accuracy_axes, time_axes) = pyplot.subplots(1, 2, figsize=(10, 4))
    sizes = [row.batch_size for row in rows]
    finals = [[accuracies[-1] for accuracies in row.accuracies] for row in rows]
    medians = [row.curve[-1] for row in rows]
    spread = [[m - min(f) for m, f in zip(medians, finals, strict=True)],
              [max(f) - m for m, f in zip(medians, finals, strict=True)]]  # fmt: skip
    accuracy_axes.errorbar(sizes, medians, yerr=spread, marker="o", capsize=3)
    accuracy_axes.axhline(target, linestyle="--", color="grey", linewidth=1)
    accuracy_axes.set_ylabel("final test accuracy: median, lowest, highest")
    time_axes.plot(sizes, [row.seconds for row in rows], marker="o", label="for an epoch")
    reached = [(row.batch_size, epochs * row.seconds) for row in rows if (epochs := row.epochs_to(target)) is not None]
    time_axes.plot(*zip(*reached, strict=True), marker="s", label="to the target")
    time_axes.set_ylabel("seconds")
    time_axes.set_ylim(bottom=0)
    time_axes.legend()
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
