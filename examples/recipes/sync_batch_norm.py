"""BatchNorm whose batch is that of all ranks, with and without frozen layers. docs/recipes/sync_batch_norm.md

torchrun --nproc-per-node=2 examples/recipes/sync_batch_norm.py [--frozen] [--native]
"""

import argparse

import torch
import torch.distributed as dist
from native_world import in_native_world
from small_problem import make_dataset, values_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import psengine


def make_network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4), nn.BatchNorm1d(4)]
    return nn.Sequential(*layers).double()  # so that one process and two can be compared closely


def freeze(layers: nn.Module) -> None:
    """Keep weights (no gradients) and statistics (evaluation mode) as they are."""
    layers.requires_grad_(False)
    layers.eval()


def train(frozen: bool) -> list[float]:
    context = psengine.init()
    network = psengine.convert_sync_batchnorm(make_network())  # on the CPU too
    if frozen:
        freeze(network[:2])  # before wrapping: parameters without gradients are not exchanged
    model = psengine.DistributedDataParallel(network.to(context.device))
    return take_steps(model, frozen, context.rank, context.world_size, context.device)


@in_native_world
def train_native(device: torch.device, frozen: bool) -> list[float]:
    if device.type == "cpu":
        raise SystemExit("torch.nn.SyncBatchNorm does not run on the CPU; psengine's does: leave out --native")
    network = nn.SyncBatchNorm.convert_sync_batchnorm(make_network())
    if frozen:
        freeze(network[:2])
    model = DistributedDataParallel(network.to(device))
    return take_steps(model, frozen, dist.get_rank(), dist.get_world_size(), device)


def take_steps(model: nn.Module, frozen: bool, rank: int, world_size: int, device: torch.device) -> list[float]:
    inputs, _ = make_dataset().tensors
    inputs = inputs[:200].double()[rank::world_size].to(device)  # parts of equal size
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        model.train()
        if frozen:
            freeze(model.module[:2])  # train() has woken the statistics
        optimizer.zero_grad()
        model(inputs).pow(3).mean().backward()
        optimizer.step()
    assert not frozen or not model.module[1].running_mean.any(), "frozen statistics stay as they were"
    print(f"rank {rank}: running means {[round(value, 4) for value in model.module[4].running_mean.tolist()]}")
    return values_of(model) + [value for buffer in model.buffers() for value in buffer.flatten().tolist()]


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--native", action="store_true", help="torch.nn.SyncBatchNorm; on GPUs only")
    parser.add_argument("--frozen", action="store_true", help="keep the first two layers as they are")
    options = parser.parse_args(arguments)
    return train_native(options.frozen) if options.native else train(options.frozen)


if __name__ == "__main__":
    main()
