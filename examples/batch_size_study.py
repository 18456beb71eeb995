"""How does the batch size change accuracy and time? docs/recipes/batch_size.md has what came of it.

psengine run --workers 2 examples/batch_size_study.py                      the learning rate grows with the batch size
psengine run --workers 2 examples/batch_size_study.py --scaling none       the learning rate is constant

The images are scikit-learn's digits, or MNIST-like images of gzipped IDX files: --data DIR. Ends with a table: the
target is a part of the best accuracy that any size reached.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import psengine

SCALINGS = {"linear": lambda ratio: ratio, "sqrt": lambda ratio: ratio**0.5, "none": lambda ratio: 1.0}


@dataclass
class Row:
    """One batch size.

    Attributes:
        batch_size: images of a step, over all workers.
        accuracies: of each run (one for each seed), of the test images after each epoch.
        epoch_s: of each run, seconds that an epoch took, without its evaluation: the median of its epochs.
    """

    batch_size: int
    learning_rate: float
    accuracies: list[list[float]] = field(default_factory=list)
    epoch_s: list[float] = field(default_factory=list)

    @property
    def curve(self) -> list[float]:
        """After each epoch the median over runs."""
        return [statistics.median(column) for column in zip(*self.accuracies, strict=True)]

    def epochs_to(self, accuracy: float) -> int | None:
        """After how many epochs the curve first has ``accuracy``; None: after none of them."""
        return next((epoch for epoch, reached in enumerate(self.curve, 1) if reached >= accuracy), None)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="MNIST-like images (default: scikit-learn's digits)")
    add("--batch-sizes", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512], help="of all workers together")
    add("--learning-rate", type=float, default=0.005, metavar="X", help="of the first size (default: 0.005)")
    add("--scaling", choices=tuple(SCALINGS), default="linear", help="of the learning rate (default: linear)")
    add("--native", action="store_true", help="torch.nn.parallel.DistributedDataParallel")
    add("--epochs", type=int, default=20, metavar="N", help="default: 20")
    add("--runs", type=int, default=3, metavar="N", help="seeds for each size (default: 3)")
    add("--part-of-best", type=float, default=0.99, metavar="X", help="how near the best accuracy (default: 0.99)")
    add("--json", type=Path, metavar="PATH", help="write the numbers there")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    with psengine.init() as context:
        train_data, test_data = load_images(options.data)
        for size in options.batch_sizes:
            if size % context.world_size:
                raise SystemExit(f"--batch-sizes: expected multiples of {context.world_size} workers, got {size}")
        scale, first = SCALINGS[options.scaling], options.batch_sizes[0]
        rows = [Row(size, options.learning_rate * scale(size / first)) for size in options.batch_sizes]
        # Run by run, not size by size: what else the machine does then slows all sizes alike.
        for seed in range(options.runs):
            for row in rows:
                train(row, seed, train_data, test_data, options, context)
                psengine.print(f"run {seed + 1}, batch size {row.batch_size}: accuracy {row.accuracies[-1][-1]:.2%}")
        if context.is_main_process:
            print_table(rows, options)
            if options.json is not None:
                options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def load_images(directory: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Flat images and labels, to train with and to test with."""
    if directory is None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images, labels = torch.from_numpy(digits.images).float().flatten(1) / 16, torch.from_numpy(digits.target)
        return TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])

    def read(name: str, header_bytes: int) -> torch.Tensor:
        content = gzip.decompress((directory / name).read_bytes())
        return torch.frombuffer(bytearray(content[header_bytes:]), dtype=torch.uint8)

    splits = []
    for split in ("train", "t10k"):
        labels = read(f"{split}-labels-idx1-ubyte.gz", 8).long()
        images = read(f"{split}-images-idx3-ubyte.gz", 16).view(len(labels), -1).float() / 255
        splits.append(TensorDataset(images, labels))
    return splits[0], splits[1]


def train(
    row: Row,
    seed: int,
    train_data: TensorDataset,
    test_data: TensorDataset,
    options: argparse.Namespace,
    context: psengine.Context,
) -> None:
    """Train with one seed, and add the run to ``row``."""
    torch.manual_seed(seed)
    pixels, classes = train_data.tensors[0].shape[1], int(train_data.tensors[1].max()) + 1
    network = nn.Sequential(nn.Linear(pixels, 256), nn.ReLU(), nn.Linear(256, classes)).to(context.device)
    wrap = nn.parallel.DistributedDataParallel if options.native else psengine.DistributedDataParallel
    model = wrap(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=row.learning_rate, momentum=0.9)
    sampler = DistributedSampler(train_data, context.world_size, context.rank, seed=seed)
    batches = BatchSampler(sampler, row.batch_size // context.world_size, drop_last=True)
    loader = DataLoader(train_data, sampler=batches, batch_size=None)
    test_images, test_labels = (tensor[context.rank :: context.world_size] for tensor in test_data.tensors)
    accuracies, seconds = [], []
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        psengine.barrier()
        started_s = time.monotonic()
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images.to(context.device)), labels.to(context.device)).backward()
            optimizer.step()
        seconds.append(max(psengine.gather(time.monotonic() - started_s)))
        with torch.no_grad():
            scores = network(test_images.to(context.device))
        accuracies.append(
            psengine.sum(int((scores.argmax(1) == test_labels.to(context.device)).sum())) / len(test_data)
        )
    row.accuracies.append(accuracies)
    row.epoch_s.append(statistics.median(seconds))


def print_table(rows: list[Row], options: argparse.Namespace) -> None:
    target = options.part_of_best * max(max(row.curve) for row in rows)
    print(f"\n{options.epochs} epochs, medians of {options.runs} runs; target {target:.2%}")
    headings = ("batch", "rate", "s/epoch", "epochs to it", "s to it", "accuracy", "(range)")
    print("".join(f"{heading:>14}" for heading in headings))
    for row in rows:
        epochs, epoch_s = row.epochs_to(target), statistics.median(row.epoch_s)
        finals = [accuracies[-1] for accuracies in row.accuracies]
        cells = [str(row.batch_size), f"{row.learning_rate:.3g}", f"{epoch_s:.2f}"]
        cells += ["-", "-"] if epochs is None else [str(epochs), f"{epochs * epoch_s:.1f}"]
        cells += [f"{row.curve[-1]:.2%}", f"{min(finals):.1%}-{max(finals):.1%}"]
        print("".join(f"{cell:>14}" for cell in cells))


if __name__ == "__main__":
    main()
