"""Train the same network on the same images under every strategy, native DistributedDataParallel first; compare.

psengine run --workers 2 examples/compare_strategies.py                     scikit-learn's digits: half a minute
torchrun --nproc-per-node=2 examples/compare_strategies.py --data DIR       Fashion-MNIST, as IDX files
psengine run --workers 2 examples/compare_strategies.py --slow-ms 20        the last worker is slower than the others

Ends with a table and a plot of the losses. Exit code 1 where "sync" is not native DistributedDataParallel, bit by bit.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from comparison_report import plot_losses, print_table
from image_data import Data, load_data
from image_network import ImageClassifier
from image_options import OptionParser, nonnegative_float, positive_float, positive_int, seed
from rank_errors import on_all_ranks, run_to_the_end, wait_for_all_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import psengine

NATIVE = "native DDP"
STRATEGIES = (NATIVE, "sync", "sync-server", "async", "async:max_staleness=2", "async:delay_compensation=0.04")


@dataclass
class Outcome:
    """What came of one strategy's training.

    Attributes:
        losses: by rank, the loss of each of its steps.
        finished_s: by rank, when each of its steps was finished, counted from the common start.
        state: rank 0's parameters and buffers at the end.
        accuracy: part of the test images that ``state`` labels correctly.
        seconds: until the last worker was done.
        staleness: how many updates old the weights of an applied gradient were -> how many gradients; {} where none.
    """

    strategy: str
    losses: list[list[float]] = field(default_factory=list)
    finished_s: list[list[float]] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    accuracy: float = 0.0
    seconds: float = 0.0
    staleness: dict[int, int] = field(default_factory=dict)


def main() -> int:
    return run_to_the_end(compare_and_report)


def compare_and_report() -> int:
    options = parse_options()
    context = psengine.init()
    outcomes = compare(options, context)
    if context.rank != 0:
        return 0
    is_equal = print_table(outcomes, reference=NATIVE)
    print(f"loss curves: {plot_losses(outcomes, options.plot)}")
    return 0 if is_equal else 1


def parse_options() -> argparse.Namespace:
    parser = OptionParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="MNIST-like images as IDX files (default: scikit-learn's digits)")
    add("--strategies", metavar="A,B", help=f"which, with commas (default: {','.join(STRATEGIES[1:])})")
    add("--epochs", type=positive_int, default=10, metavar="N", help="default: 10")
    add("--batch-size", type=positive_int, default=16, metavar="N", help="images of each worker's step (default: 16)")
    add("--learning-rate", type=positive_float, default=0.05, metavar="X", help="of the mean gradient (default: 0.05)")
    add("--slow-ms", type=nonnegative_float, default=0.0, metavar="MS", help="the last worker takes so much longer")
    add("--seed", type=seed, default=0, metavar="N", help="of the first weights and the order of images (default: 0)")
    add("--plot", type=Path, default=Path("runs/strategies.png"), metavar="PATH", help="default: runs/strategies.png")
    options = parser.parse_args()
    chosen = [name.strip() for name in options.strategies.split(",")] if options.strategies else STRATEGIES[1:]
    options.strategies = (NATIVE, *(name for name in chosen if name and name != NATIVE))
    return options


def compare(options: argparse.Namespace, context: psengine.Context) -> list[Outcome]:
    data = on_all_ranks(lambda: load_data(options.data))
    torch.manual_seed(options.seed)
    network = ImageClassifier(data.classes)
    outcomes = []
    # The first steps of a process find libraries to load and memory to get; nobody's time should have them in it.
    for strategy in {name.partition(":")[0]: name for name in options.strategies}.values():
        train(strategy, copy.deepcopy(network).to(context.device), data, options, context, most_steps=5)
    for strategy in options.strategies:
        outcome = train(strategy, copy.deepcopy(network).to(context.device), data, options, context)
        outcome.accuracy = evaluate(outcome.state, copy.deepcopy(network).to(context.device), data, context)
        outcomes.append(outcome)
        if context.rank == 0:
            loss = sum(losses[-1] for losses in outcome.losses) / len(outcome.losses)
            print(
                f"{strategy}: {outcome.seconds:.1f} s, last loss {loss:.4f}, accuracy {outcome.accuracy:.2%}",
                flush=True,
            )
    return outcomes


def train(
    strategy: str,
    network: nn.Module,
    data: Data,
    options: argparse.Namespace,
    context: psengine.Context,
    most_steps: int | None = None,
) -> Outcome:
    """Train ``network`` from the weights it has; every worker sees the same batches under every strategy."""
    model, optimizer = on_all_ranks(lambda: wrap(strategy, network, options.learning_rate, context))
    losses, finished_s = [], []
    wait_for_all_ranks()
    started_s = time.monotonic()
    for images, labels in itertools.islice(batches(data, options, context), most_steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(context.device)), labels.to(context.device))
        loss.backward()
        if context.rank == context.world_size - 1:
            time.sleep(options.slow_ms / 1000)
        optimizer.step()
        if isinstance(model, psengine.DistributedDataParallel):
            model.report(loss=loss, samples=len(labels))  # for the servers' dashboard
        losses.append(loss.item())
        finished_s.append(time.monotonic() - started_s)
    seconds = max(psengine.gather(time.monotonic() - started_s))
    outcome = Outcome(strategy, seconds=seconds)
    outcome.losses = [tensor.tolist() for tensor in psengine.gather(torch.tensor(losses, dtype=torch.float64))]
    outcome.finished_s = [tensor.tolist() for tensor in psengine.gather(torch.tensor(finished_s, dtype=torch.float64))]
    outcome.state = {name: tensor.detach().clone() for name, tensor in model.module.state_dict().items()}
    outcome.staleness = staleness_of(model)
    wait_for_all_ranks()  # the strategy of rank 0 may keep the server that all others still talk to
    if isinstance(model, psengine.DistributedDataParallel):
        model.leave()
    return outcome


def wrap(
    strategy: str, network: nn.Module, learning_rate: float, context: psengine.Context
) -> tuple[nn.parallel.DistributedDataParallel, torch.optim.Optimizer]:
    if strategy == NATIVE:
        model = nn.parallel.DistributedDataParallel(network)
        return model, torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    model = psengine.DistributedDataParallel(network, strategy=strategy)
    if model.strategy.name == "async":
        # An update is one worker's gradient there, not the mean of all: so many more updates, each so much smaller.
        learning_rate /= context.world_size
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    return model, psengine.DistributedOptimizer(optimizer, model)


def batches(
    data: Data, options: argparse.Namespace, context: psengine.Context
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    sampler = DistributedSampler(data.train, context.world_size, context.rank, seed=options.seed)
    loader = DataLoader(data.train, sampler=BatchSampler(sampler, options.batch_size, drop_last=True), batch_size=None)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        yield from loader


def staleness_of(model: nn.parallel.DistributedDataParallel) -> dict[int, int]:
    """What the servers counted under async."""
    is_async = isinstance(model, psengine.DistributedDataParallel) and model.strategy.name == "async"
    return dict(model.statistics().staleness) if is_async else {}


@torch.no_grad()
def evaluate(state: dict[str, torch.Tensor], network: nn.Module, data: Data, context: psengine.Context) -> float:
    """Accuracy of rank 0's model; each rank counts a part of the images, every image once."""
    network.load_state_dict(state)
    for tensor in network.state_dict().values():
        dist.broadcast(tensor, src=0)
    network.eval()
    images, labels = (tensor[context.rank :: context.world_size].to(context.device) for tensor in data.test.tensors)
    correct = sum(
        int((network(i).argmax(1) == t).sum()) for i, t in zip(images.split(256), labels.split(256), strict=True)
    )
    return float(psengine.mean(correct / max(1, len(labels)), weight=len(labels)))


if __name__ == "__main__":
    exit_code = main()
    psengine.shutdown()
    sys.exit(exit_code)
