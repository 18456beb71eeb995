"""Train the same network under several strategies, native DistributedDataParallel first: a table and a plot.

psengine run --workers 2 --strategy async --no-prefix examples/compare_strategies.py     a minute and a half

The command's strategy starts the server; this script names a strategy for each training.

Two settings: equal workers, and the last worker four times slower. Every strategy trains for the same seconds, so a
strategy that does not wait takes more steps. The images are scikit-learn's digits, half of them to train with. Real
computing takes a millisecond a step; a worker sleeps until its step has taken ``--step-ms``, the slow one four times
that. Exchanges, servers and optimizers are real.

Before that 20 steps of "sync" are compared with native DistributedDataParallel's; exit code 1 where a bit differs.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import psengine

NATIVE = "native DDP"
# An asynchronous update is one worker's gradient, not the mean of all: there are more updates, so each is smaller. The
# last row keeps the rate, to show what that costs.
NOT_DIVIDED = "async, rate not divided"
STRATEGIES = (NATIVE, "sync", "sync-server", "local:every=8", "async", "async:staleness_scaling=inverse", NOT_DIVIDED)
SERVERS = ("sync-server", "async", "diloco-server")  # their servers tell trainings apart by a job's name
# Name -> how many times slower the last worker is, and how many times longer a training takes.
SETTINGS = {"equal workers": (1, 1), "one worker 4 times slower": (4, 2)}
SNAPSHOTS, SMOOTHED = 40, 3
CHECKED_STEPS = 20


@dataclass
class Training:
    """What one training gave: samples of all workers, and (seconds, test accuracy) of rank 0's weights."""

    samples: int
    curve: list[tuple[float, float]]

    @property
    def accuracy(self) -> float:
        return statistics.mean(accuracy for _, accuracy in self.curve[-SMOOTHED:])

    def seconds_to(self, target: float) -> float:
        """When the median of a few successive accuracies first reached the target; infinite if it did not."""
        windows = zip(*(self.curve[start:] for start in range(SMOOTHED)), strict=False)
        reached = (w[-1][0] for w in windows if statistics.median(accuracy for _, accuracy in w) >= target)
        return next(reached, float("inf"))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--strategies", metavar="A;B", help=f"separated by semicolons (default: {';'.join(STRATEGIES[1:])})")
    add("--seconds", type=float, default=1.5, metavar="S", help="with equal workers; else twice that (default: 1.5)")
    add("--runs", type=int, default=2, metavar="N", help="trainings of each, with other first weights (default: 2)")
    add("--batch-size", type=int, default=16, metavar="N", help="images of each worker's step (default: 16)")
    add("--learning-rate", type=float, default=0.1, metavar="X", help="at the beginning (default: 0.1)")
    add("--step-ms", type=float, default=5.0, metavar="MS", help="that a step of a fast worker takes (default: 5)")
    add("--target", type=float, default=0.93, metavar="X", help="the accuracy to reach (default: 0.93)")
    add("--plot", type=Path, default=Path("runs/strategies.png"), metavar="PATH", help="default: runs/strategies.png")
    options = parser.parse_args()
    chosen = options.strategies.split(";") if options.strategies else STRATEGIES[1:]
    options.strategies = (NATIVE, *(name for name in chosen if name != NATIVE))
    return options


def main() -> int:
    options = parse_options()
    with psengine.init() as context:
        train_data, test_data = load_digits(context.device)
        is_equal = compare_bits(train_data, options, context)
        found: dict[tuple[str, str], list[Training]] = defaultdict(list)
        for number, (setting, strategy, seed) in enumerate(
            itertools.product(SETTINGS, options.strategies, range(options.runs))
        ):
            training = train(strategy, setting, seed, f"{number}", train_data, test_data, options, context)
            found[setting, strategy].append(training)
            if context.rank == 0:
                print(f"{setting}, {strategy}: accuracy {training.accuracy:.1%}", flush=True)
        if context.rank == 0:
            print_table(found, options)
            plot(found, options)
            how = "the same bits" if is_equal else "OTHER BITS"
            print(f"sync and native DDP have {how} after {CHECKED_STEPS} steps. Curves: {options.plot}")
    return 0 if is_equal else 1


def load_digits(device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Images of shape (count, 1, 8, 8) and labels: to train with, and to test with."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = (torch.from_numpy(digits.images).float() / 8 - 1).unsqueeze(1)[order].to(device)
    labels = torch.from_numpy(digits.target)[order].to(device)
    half = len(labels) // 2
    return (images[:half], labels[:half]), (images[half:], labels[half:])


def make_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def wrap(
    strategy: str, seed: int, job: str, options: argparse.Namespace, context: psengine.Context
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer; servers tell trainings apart by ``job``."""
    torch.manual_seed(seed)
    network = make_network().to(context.device)
    is_divided = strategy.startswith("async") and strategy != NOT_DIVIDED
    learning_rate = options.learning_rate / (context.world_size if is_divided else 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=learning_rate, momentum=0.9)
    if strategy == NATIVE:
        return nn.parallel.DistributedDataParallel(network), optimizer
    name = "async" if strategy == NOT_DIVIDED else strategy
    if name.startswith(SERVERS):
        name += f"{',' if ':' in name else ':'}job={job}"
    model = psengine.DistributedDataParallel(network, strategy=name)
    return model, psengine.DistributedOptimizer(optimizer, model)


def batches(
    data: tuple[torch.Tensor, torch.Tensor], seed: int, options: argparse.Namespace, context: psengine.Context
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Without end: this worker's part, in another order in each epoch."""
    images, labels = (tensor[context.rank :: context.world_size] for tensor in data)
    generator = torch.Generator().manual_seed(seed)
    while True:
        for picked in torch.randperm(len(labels), generator=generator).split(options.batch_size):
            yield images[picked], labels[picked]


def train(
    strategy: str,
    setting: str,
    seed: int,
    job: str,
    train_data: tuple[torch.Tensor, torch.Tensor],
    test_data: tuple[torch.Tensor, torch.Tensor],
    options: argparse.Namespace,
    context: psengine.Context,
) -> Training:
    model, optimizer = wrap(strategy, seed, job, options, context)
    slowdown, longer = SETTINGS[setting]
    duration_s = longer * options.seconds
    step_s = options.step_ms / 1000 * (slowdown if context.rank == context.world_size - 1 else 1)
    first_rate = optimizer.param_groups[0]["lr"]
    take_step(model, optimizer, *next(batches(train_data, seed, options, context)))  # connects and lays out buckets
    dist.barrier()
    started_s, samples = time.monotonic(), 0
    snapshots: list[tuple[float, list[torch.Tensor]]] = []
    for images, labels in batches(train_data, seed, options, context):
        now_s = time.monotonic() - started_s
        if is_over(now_s >= duration_s, strategy):
            break
        optimizer.param_groups[0]["lr"] = first_rate * max(0.0, 1 - now_s / duration_s)
        take_step(model, optimizer, images, labels, until_s=time.monotonic() + step_s)
        samples += len(labels)
        now_s = time.monotonic() - started_s
        if context.rank == 0 and now_s >= len(snapshots) * duration_s / SNAPSHOTS:
            snapshots.append((now_s, [parameter.detach().clone() for parameter in model.parameters()]))
    dist.barrier()  # rank 0 may keep the server that all others still talk to
    if isinstance(model, psengine.DistributedDataParallel):
        model.leave()
    return Training(psengine.sum(samples), evaluate(snapshots, test_data))


def take_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor, until_s: float = 0.0
) -> None:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    time.sleep(max(0.0, until_s - time.monotonic()))  # stands for a longer forward
    loss.backward()
    optimizer.step()


def is_over(is_late: bool, strategy: str) -> bool:
    """Whether to stop: workers that wait for each other in every step or round follow rank 0."""
    if strategy.startswith("async"):
        return is_late
    flag = torch.tensor(float(is_late))
    dist.broadcast(flag, 0)
    return bool(flag)


@torch.no_grad()
def evaluate(
    snapshots: Sequence[tuple[float, list[torch.Tensor]]], data: tuple[torch.Tensor, torch.Tensor]
) -> list[tuple[float, float]]:
    network, curve = make_network().to(data[0].device), []
    for second, weights in snapshots:
        for parameter, values in zip(network.parameters(), weights, strict=True):
            parameter.copy_(values)
        curve.append((second, (network(data[0]).argmax(1) == data[1]).float().mean().item()))
    return curve


def compare_bits(
    data: tuple[torch.Tensor, torch.Tensor], options: argparse.Namespace, context: psengine.Context
) -> bool:
    """Whether the first steps of "sync" have native DDP's bits, on this rank."""
    weights = []
    for strategy in (NATIVE, "sync"):
        model, optimizer = wrap(strategy, 0, "bits", options, context)
        for images, labels in itertools.islice(batches(data, 0, options, context), CHECKED_STEPS):
            take_step(model, optimizer, images, labels)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(*weights, strict=True))


def print_table(found: dict[tuple[str, str], list[Training]], options: argparse.Namespace) -> None:
    print("\n" + " " * 31 + "".join(f"{setting:>32}" for setting in SETTINGS))
    print(f"{'strategy':31}" + f"{'accuracy':>12}{f's to {options.target:.0%}':>10}{'images/s':>10}" * len(SETTINGS))
    print("─" * 95)
    for strategy in options.strategies:
        cells = ""
        for setting, (_, longer) in SETTINGS.items():
            own = found[setting, strategy]
            accuracy = statistics.mean(training.accuracy for training in own)
            seconds = statistics.median(training.seconds_to(options.target) for training in own)
            speed = statistics.mean(training.samples for training in own) / (longer * options.seconds)
            cells += f"{accuracy:>12.1%}{'never' if seconds == float('inf') else f'{seconds:.2f}':>10}{speed:>10,.0f}"
        print(f"{strategy:31}{cells}")
    lengths = " and ".join(f"{longer * options.seconds:g} s" for _, longer in SETTINGS.values())
    print(
        f"\n{options.runs} trainings of each, of {lengths}; accuracy at the end; computing is emulated.\n"
        "With equal workers sync is the best choice: async adds only staleness. With one worker that stays\n"
        "slow, async takes more steps in the same time; divide its learning rate by the number of workers.\n"
        "local saves exchanges, which pays on slow links."
    )


def plot(found: dict[tuple[str, str], list[Training]], options: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(1, len(SETTINGS), figsize=(11, 4), sharey=True)
    for axes, setting in zip(grid, SETTINGS, strict=True):
        for number, strategy in enumerate(options.strategies):
            axes.plot(*zip(*found[setting, strategy][0].curve, strict=True), label=strategy, color=f"C{number}")
        axes.axhline(options.target, color="grey", linewidth=0.8, linestyle=":")
        axes.set(title=setting, xlabel="seconds", ylim=(0.5, 1.0))
        axes.grid(alpha=0.3)
    grid[0].set_ylabel("test accuracy")
    grid[0].legend(fontsize=8)
    options.plot.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(options.plot, dpi=90)


if __name__ == "__main__":
    sys.exit(main())
