"""Train a small convolutional network on images, on one process or many.

python examples/train_images.py                                        one process
torchrun --nproc-per-node=2 examples/train_images.py                   two
torchrun --nproc-per-node=2 examples/train_images.py --compare         native DistributedDataParallel trains beside it
torchrun --nproc-per-node=2 examples/train_images.py --strategy async  gradients go to a server, which rank 0 starts
python examples/train_images.py --evaluate digits.pt                   a checkpoint's accuracy, in plain PyTorch

Workers that know each other only through a parameter server, and may come and go. Each takes its part of the images;
worker 0 prints and saves.

psengine-server                                                                      a server
export PSENGINE_SERVERS=tcp://127.0.0.1:7077 PSENGINE_WORKERS=2                      in two other terminals:
PSENGINE_WORKER=0 python examples/train_images.py --strategy async                   a worker
PSENGINE_WORKER=1 python examples/train_images.py --strategy async                   another
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from epoch_losses import EpochLosses
from image_checkpoint import check_fit, check_writable, load_pretrained, load_weights, save
from image_data import load_data
from image_network import ImageClassifier
from image_options import parse_options
from rank_errors import (
    TrainingError,
    UserError,
    on_all_ranks,
    print_error,
    speaks_for_its_group,
    wait_for_all_ranks,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import psengine

Batch = list[torch.Tensor]  # images, labels

EVALUATION_BATCH_SIZE = 256

# By strategy, how far --compare lets weights differ from native's. A server adds gradients up in another order, and
# what that changes in the last bit grows from step to step.
TOLERANCES = {"sync": 0.0, "sync-server": 0.05}


def main() -> int:
    try:
        options = parse_options(__doc__)
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        if options.evaluate is not None:
            evaluate(options)
            return 0
        train(options, psengine.init())
    except UserError as error:
        if speaks_for_its_group():
            print_error(error)
        wait_for_all_ranks()
        return 2
    except (psengine.ConfigurationError, psengine.EnvironmentVariableError) as error:
        print_error(error)
        return 2
    except TrainingError as error:
        print_error(error)
        wait_for_all_ranks()
        return 1
    return 0


def train(options: argparse.Namespace, context: psengine.Context) -> None:
    data = on_all_ranks(lambda: load_data(options.data))
    if context.workers > len(data.train):
        raise UserError(
            f"every worker needs a training image (expected at most {len(data.train)} workers, got {context.workers})"
        )
    torch.manual_seed(options.seed)
    network = ImageClassifier(data.classes)
    if options.pretrained is not None:
        # Rank 0 alone reads the file: wrapping a network gives all ranks its parameters and buffers.
        on_all_ranks(lambda: load_pretrained(network, options.pretrained, context.device), only_rank=0)
    if options.checkpoint is not None:
        on_all_ranks(lambda: check_writable(options.checkpoint) if context.is_main_process else None)

    # The last samples of some ranks are repeated ones, so that all ranks have equally many.
    sampler = DistributedSampler(data.train, context.workers, context.worker, seed=options.seed)
    batches = BatchSampler(sampler, options.batch_size, drop_last=False)
    loader = DataLoader(data.train, sampler=batches, batch_size=None)  # fetches a batch at once
    steps_per_epoch = math.ceil(len(loader) / options.accumulate)
    last_step = min(options.epochs * steps_per_epoch, options.max_steps or math.inf)

    replicas = [on_all_ranks(lambda: make_replica(copy.deepcopy(network), options, context, last_step))]
    if options.compare:
        strategy = replicas[0].model.strategy.name
        if strategy not in TOLERANCES:
            raise UserError(
                f"--compare: native DistributedDataParallel takes the same steps as some strategies only (expected"
                f" {' or '.join(TOLERANCES)}, got {strategy})"
            )
        tolerance = TOLERANCES[strategy]
        replicas.append(make_native_replica(copy.deepcopy(network), options, context, last_step))
    if context.is_main_process:
        print(
            f"{len(data.train)} training and {len(data.test)} test images of {data.classes} classes;"
            f" world size {context.world_size}, on {context.device}",
            flush=True,
        )

    step = 0
    for epoch in range(1, options.epochs + 1):
        sampler.set_epoch(epoch)  # another order in each epoch
        losses = EpochLosses(context, epoch, min(steps_per_epoch, last_step - step), options.report_every)
        for micro_batches in in_groups(loader, options.accumulate):
            loss, *_ = [train_step(replica, micro_batches, context.device) for replica in replicas]
            losses.add(loss, sample_count(micro_batches))
            step += 1
            if step == last_step:
                break
        mean_loss = losses.finish()

        network.load_state_dict(replicas[0].model.module.state_dict())
        correct, count = evaluate_together(network.to(context.device), data.test, context)
        if options.checkpoint is not None:
            on_all_ranks(lambda: save(network, options.checkpoint) if context.is_main_process else None)
        differences = [largest_differences(replicas[0].model, native.model) for native in replicas[1:]]
        if context.is_main_process:
            results = [f"epoch {epoch}/{options.epochs}", f"step {step}", f"loss {mean_loss:.4f}"]
            results += [describe_accuracy(correct, count), *map(describe_differences, differences)]
            print(*results, sep="  ", flush=True)
        for difference in differences:
            if any(not value <= tolerance for value in difference.values()):
                expected = f"at most {tolerance:g}" if tolerance else "no difference"
                raise TrainingError(
                    f"psengine and native DistributedDataParallel differ after epoch {epoch}, step {step} (expected"
                    f" {expected}, got {describe_differences(difference)})"
                )
        if step == last_step:
            break
    if options.compare and context.is_main_process:
        how = f"within {tolerance:g}" if tolerance else "to the last bit"
        print(f"psengine and native DistributedDataParallel are equal {how} after {step} steps")


def train_step(replica: Replica, micro_batches: list[Batch], device: torch.device) -> torch.Tensor:
    """Make one optimizer step; return this rank's mean loss over the samples of all micro-batches."""
    replica.optimizer.zero_grad()
    step_loss = torch.zeros((), device=device)
    for position, (images, labels) in enumerate(micro_batches, start=1):
        # Only the last micro-batch exchanges gradients; the forward belongs inside no_sync() too.
        with nullcontext() if position == len(micro_batches) else replica.model.no_sync():
            outputs = replica.model(images.to(device))
            loss = F.cross_entropy(outputs, labels.to(device), reduction="sum") / sample_count(micro_batches)
            loss.backward()
        step_loss += loss.detach()
    replica.optimizer.step()
    if isinstance(replica.model, psengine.DistributedDataParallel):
        replica.model.report(loss=step_loss, samples=sample_count(micro_batches))  # for the servers' dashboard
    if replica.scheduler is not None:
        replica.scheduler.step()
    return step_loss


def in_groups(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Yield lists of ``size`` batches; the last may be shorter."""
    group = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def sample_count(micro_batches: Iterable[Batch]) -> int:
    return sum(len(labels) for _, labels in micro_batches)


@dataclass
class Replica:
    """One copy of the network on this rank, and what trains it."""

    model: nn.parallel.DistributedDataParallel  # psengine's is one too
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None


def make_replica(network: nn.Module, options: argparse.Namespace, context: psengine.Context, last_step: int) -> Replica:
    network = network.to(context.device)
    if options.sync_batchnorm:
        network = psengine.convert_sync_batchnorm(network)
    model = psengine.DistributedDataParallel(network, strategy=options.strategy)
    optimizer = psengine.DistributedOptimizer(make_optimizer(model, options), model)
    return Replica(model, optimizer, make_scheduler(optimizer, options, last_step))


def make_native_replica(
    network: nn.Module, options: argparse.Namespace, context: psengine.Context, last_step: int
) -> Replica:
    """What ``make_replica`` does, in plain PyTorch."""
    network = network.to(context.device)
    if options.sync_batchnorm:
        if context.device.type == "cpu":
            raise UserError(
                "--compare --sync-batchnorm needs GPUs: PyTorch's own SyncBatchNorm does not run on the CPU"
            )
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    torch.backends.cudnn.deterministic = True  # else the same convolution may differ from itself
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = make_optimizer(model, options)
    return Replica(model, optimizer, make_scheduler(optimizer, options, last_step))


def make_optimizer(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    if options.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    return torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=options.momentum)


def make_scheduler(
    optimizer: torch.optim.Optimizer, options: argparse.Namespace, last_step: int
) -> torch.optim.lr_scheduler.LRScheduler | None:
    if options.scheduler == "cosine":
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=last_step)
    return None


def evaluate_together(network: nn.Module, dataset: TensorDataset, context: psengine.Context) -> tuple[int, int]:
    """Give all ranks rank 0's ``network``; return how many images of ``dataset`` it labels correctly, and how many are.

    Ranks' running statistics differ (in asynchronous strategies, weights too) and rank 0's are what is saved. Each rank
    takes every world_size-th image: a DistributedSampler would count some twice.
    """
    for tensor in network.state_dict().values():
        dist.broadcast(tensor, src=0)
    images, labels = (tensor[context.rank :: context.world_size] for tensor in dataset.tensors)
    correct = count_correct(network, images, labels, context.device)
    totals = psengine.sum({"correct": correct, "count": len(labels)})
    return totals["correct"], totals["count"]


def evaluate(options: argparse.Namespace) -> None:
    """Print the accuracy of a checkpoint, without psengine."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = load_data(options.data)
    network = ImageClassifier(data.classes)
    weights = load_weights(options.evaluate, device)
    check_fit(weights, network.state_dict(), options.evaluate)
    network.load_state_dict(weights)
    correct = count_correct(network.to(device), *data.test.tensors, device)
    psengine.print(describe_accuracy(correct, len(data.test)))


@torch.no_grad()
def count_correct(network: nn.Module, images: torch.Tensor, labels: torch.Tensor, device: torch.device) -> int:
    network.eval()
    correct = 0
    for start in range(0, len(images), EVALUATION_BATCH_SIZE):
        batch = slice(start, start + EVALUATION_BATCH_SIZE)
        guesses = network(images[batch].to(device)).argmax(dim=1)
        correct += int((guesses == labels[batch].to(device)).sum())
    return correct


def describe_accuracy(correct: int, count: int) -> str:
    return f"accuracy {correct / count:.2%} ({correct}/{count})"


@torch.no_grad()
def largest_differences(
    model: psengine.DistributedDataParallel, other: nn.parallel.DistributedDataParallel
) -> dict[str, float]:
    """Return the largest absolute difference over all ranks, of parameters and of buffers."""
    ours = []
    for tensors, others in ((model.parameters(), other.parameters()), (model.buffers(), other.buffers())):
        pairs = zip(tensors, others, strict=True)
        ours.append(max((a.double() - b.double()).abs().max() for a, b in pairs))
    everyones = torch.stack(list(psengine.gather(torch.stack(ours))))
    parameters, buffers = everyones.amax(dim=0).tolist()
    if model.strategy.capabilities.carries_buffers:
        # All ranks have rank 0's already, which native DDP will give them before the next forward.
        buffers = everyones[0, 1].item()
    return {"parameters": parameters, "buffers": buffers}


def describe_differences(differences: dict[str, float]) -> str:
    return "largest difference: " + ", ".join(f"{name} {value:g}" for name, value in differences.items())


if __name__ == "__main__":
    exit_code = main()
    psengine.shutdown()
    sys.exit(exit_code)
