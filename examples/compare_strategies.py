"""Train the same network on the same images under every strategy, native DistributedDataParallel first; compare.

psengine run --workers 2 --servers 1 examples/compare_strategies.py         scikit-learn's digits: a minute
torchrun --nproc-per-node=2 examples/compare_strategies.py --data DIR       Fashion-MNIST, as IDX files
psengine run --workers 2 examples/compare_strategies.py --slow-ms 20        the last worker is slower than the others

A run trains on one half of the digits and tests on the other, then the other way round: every image is tested once.
Training is short, because after many epochs all strategies classify the digits equally well. The learning rate falls
linearly to 0, because otherwise the last few batches decide the loss, not the strategy. With ``--data`` a run trains
once and is tested on the test images. Each run has its own first weights and order of images, the same under every
strategy.

Ends with a table and a plot of the losses. Exit code 1 where "sync" is not native DistributedDataParallel, bit by bit.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from comparison_report import plot_losses, print_table
from image_data import Data, load_data, swapped_halves
from image_network import ImageClassifier
from image_options import OptionParser, nonnegative_float, positive_float, positive_int, seed
from rank_errors import UserError, on_all_ranks, run_to_the_end, wait_for_all_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import psengine

NATIVE = "native DDP"
# An asynchronous update is one worker's gradient, not the mean of all: so many more updates, and each should be so much
# smaller. This one keeps the rate, to show what that costs.
NOT_DIVIDED = "async (rate not divided)"
BOUNDED, SCALED = "async:max_staleness=2", "async:staleness_scaling=inverse"
ASYNCHRONOUS = ("async", BOUNDED, SCALED, "async:delay_compensation=0.04", NOT_DIVIDED)
STRATEGIES = (NATIVE, "sync", "sync-server", *ASYNCHRONOUS)
MOMENTUM = 0.9


@dataclass(kw_only=True)
class Training:
    """What came of training one network under one strategy.

    Attributes:
        losses: by rank, the loss of each of its steps.
        finished_s: by rank, when each of its steps was finished, counted from the common start.
        state: rank 0's parameters and buffers at the end.
        seconds: until the last worker was done.
        staleness: how many updates old the weights of an applied gradient were -> how many gradients; {} where none.
        test_losses: of ``state``, for each test image; the same order under every strategy.
        is_correct: whether ``state`` labels the test image correctly.
    """

    losses: list[list[float]]
    finished_s: list[list[float]]
    state: dict[str, torch.Tensor]
    seconds: float
    staleness: dict[int, int]
    test_losses: torch.Tensor
    is_correct: torch.Tensor


@dataclass
class Outcome:
    """A strategy's trainings: by run, and within it by the images that were trained on.

    Attributes:
        test_images: how many different images the trainings of a run were tested on.
    """

    strategy: str
    learning_rate: float
    trainings: list[Training]
    test_images: int


def main() -> int:
    return run_to_the_end(compare_and_report)


def compare_and_report() -> int:
    options = parse_options()
    context = psengine.init()
    outcomes = compare(options, context)
    if context.rank != 0:
        return 0
    is_equal = print_table(outcomes, reference=NATIVE, momentum=MOMENTUM)
    print(f"loss curves: {plot_losses(outcomes, options.plot)}")
    return 0 if is_equal else 1


def parse_options() -> argparse.Namespace:
    parser = OptionParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="MNIST-like images as IDX files (default: scikit-learn's digits)")
    add("--strategies", metavar="A,B", help=f"which, with commas (default: {','.join(STRATEGIES[1:])})")
    add("--epochs", type=positive_int, default=3, metavar="N", help="of a training (default: 3)")
    add("--runs", type=positive_int, default=3, metavar="N", help="of each strategy (default: 3)")
    add("--batch-size", type=positive_int, default=16, metavar="N", help="images of each worker's step (default: 16)")
    add("--learning-rate", type=positive_float, default=0.4, metavar="X", help="at the first step (default: 0.4)")
    add("--slow-ms", type=nonnegative_float, default=0.0, metavar="MS", help="the last worker takes so much longer")
    add("--seed", type=seed, default=0, metavar="N", help="of the first run's weights and order of images (default: 0)")
    add("--plot", type=Path, default=Path("runs/strategies.png"), metavar="PATH", help="default: runs/strategies.png")
    options = parser.parse_args()
    chosen = [name.strip() for name in options.strategies.split(",")] if options.strategies else STRATEGIES[1:]
    options.strategies = (NATIVE, *(name for name in chosen if name and name != NATIVE))
    return options


def compare(options: argparse.Namespace, context: psengine.Context) -> list[Outcome]:
    tasks = on_all_ranks(lambda: load_tasks(options, context))
    # The first steps of a process find libraries to load and memory to get; nobody's time should have them in it.
    for kind, strategy in {name.partition(":")[0]: name for name in options.strategies}.items():
        train(strategy, tasks[0], options, context, options.seed, job=f"warm-up-{kind}", most_steps=5)
    outcomes = []
    for number, strategy in enumerate(options.strategies):
        seeds = range(options.seed, options.seed + options.runs)
        trainings = [
            train(strategy, task, options, context, seed, job=f"{number}-{seed}-{part}")
            for seed in seeds
            for part, task in enumerate(tasks)
        ]
        test_images = sum(len(task.test) for task in tasks)
        outcomes.append(Outcome(strategy, rate_of(strategy, options, context), trainings, test_images))
        if context.rank == 0:
            seconds = sum(training.seconds for training in trainings)
            loss = torch.stack([training.test_losses.mean() for training in trainings]).mean()
            print(f"{strategy}: {len(trainings)} trainings in {seconds:.1f} s, test loss {loss:.4f}", flush=True)
    return outcomes


def load_tasks(options: argparse.Namespace, context: psengine.Context) -> list[Data]:
    """What a run trains on and is tested on, one after the other."""
    data = load_data(options.data)
    tasks = [data] if options.data else swapped_halves(data)
    fewest = min(len(task.train) for task in tasks) // context.world_size
    if options.batch_size > fewest:
        raise UserError(f"--batch-size: expected at most the {fewest} images of a worker, got {options.batch_size}")
    return tasks


def train(
    strategy: str,
    data: Data,
    options: argparse.Namespace,
    context: psengine.Context,
    seed: int,
    job: str,
    most_steps: int | None = None,
) -> Training:
    """Train and test a network; every worker sees the same batches under every strategy.

    Servers that several trainings share tell them apart by ``job``.
    """
    torch.manual_seed(seed)
    network = ImageClassifier(data.classes).to(context.device)
    model, optimizer = on_all_ranks(lambda: wrap(strategy, network, rate_of(strategy, options, context), job))
    loader = make_loader(data.train, options, context, seed)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, options.epochs * len(loader))  # a straight line to 0
    losses, finished_s = [], []
    wait_for_all_ranks()
    started_s = time.monotonic()
    for images, labels in itertools.islice(batches(loader, options.epochs), most_steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(context.device)), labels.to(context.device))
        loss.backward()
        if context.rank == context.world_size - 1:
            time.sleep(options.slow_ms / 1000)
        optimizer.step()
        scheduler.step()
        if isinstance(model, psengine.DistributedDataParallel):
            model.report(loss=loss, samples=len(labels))  # for the servers' dashboard
        losses.append(loss.item())
        finished_s.append(time.monotonic() - started_s)
    seconds = max(psengine.gather(time.monotonic() - started_s))
    state = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
    staleness = staleness_of(model)
    wait_for_all_ranks()  # the strategy of rank 0 may keep the server that all others still talk to
    if isinstance(model, psengine.DistributedDataParallel):
        model.leave()
    test_losses, is_correct = evaluate(network, data, context)
    return Training(
        losses=[tensor.tolist() for tensor in psengine.gather(torch.tensor(losses, dtype=torch.float64))],
        finished_s=[tensor.tolist() for tensor in psengine.gather(torch.tensor(finished_s, dtype=torch.float64))],
        state=state,
        seconds=seconds,
        staleness=staleness,
        test_losses=test_losses,
        is_correct=is_correct,
    )


def rate_of(strategy: str, options: argparse.Namespace, context: psengine.Context) -> float:
    """The learning rate: ``--learning-rate``, under ``async`` divided by the number of workers."""
    is_divided = strategy.startswith("async") and strategy != NOT_DIVIDED
    return options.learning_rate / (context.world_size if is_divided else 1)


def wrap(
    strategy: str, network: nn.Module, learning_rate: float, job: str
) -> tuple[nn.parallel.DistributedDataParallel, torch.optim.Optimizer]:
    if strategy == NATIVE:
        model = nn.parallel.DistributedDataParallel(network)
        return model, torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=MOMENTUM)
    name = "async" if strategy == NOT_DIVIDED else strategy
    if name != "sync":
        name += f"{',' if ':' in name else ':'}job={job}"
    model = psengine.DistributedDataParallel(network, strategy=name)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=MOMENTUM)
    return model, psengine.DistributedOptimizer(optimizer, model)


def make_loader(
    dataset: TensorDataset, options: argparse.Namespace, context: psengine.Context, seed: int
) -> DataLoader:
    sampler = DistributedSampler(dataset, context.world_size, context.rank, seed=seed)
    return DataLoader(dataset, sampler=BatchSampler(sampler, options.batch_size, drop_last=True), batch_size=None)


def batches(loader: DataLoader, epochs: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for epoch in range(epochs):
        loader.sampler.sampler.set_epoch(epoch)
        yield from loader


def staleness_of(model: nn.parallel.DistributedDataParallel) -> dict[int, int]:
    """What the servers counted under async."""
    is_async = isinstance(model, psengine.DistributedDataParallel) and model.strategy.name == "async"
    return dict(model.statistics().staleness) if is_async else {}


@torch.no_grad()
def evaluate(network: nn.Module, data: Data, context: psengine.Context) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, whether the label is right) of rank 0's network for each test image; each rank takes a part of them."""
    for tensor in network.state_dict().values():
        dist.broadcast(tensor, src=0)
    network.eval()
    images, labels = (tensor[context.rank :: context.world_size].to(context.device) for tensor in data.test.tensors)
    scores = torch.cat([network(part) for part in images.split(256)])
    test_losses = F.cross_entropy(scores, labels, reduction="none").cpu()
    is_correct = (scores.argmax(1) == labels).cpu()
    return torch.cat(psengine.gather(test_losses)), torch.cat(psengine.gather(is_correct))


if __name__ == "__main__":
    exit_code = main()
    psengine.shutdown()
    sys.exit(exit_code)
