"""Gradients add up within a process and are averaged across processes. docs/recipes/sum_and_mean.md

torchrun --nproc-per-node=2 examples/recipes/sum_and_mean.py [--native]
"""

import argparse

import torch
import torch.distributed as dist
from native_world import in_native_world
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import psengine


def gradients(model: nn.Module, rank: int, world_size: int, device: torch.device) -> dict[str, float]:
    """Each rank's samples are rank + 1, so that every kind of average has a number of its own."""
    weight = next(model.parameters())
    sample = torch.full((1, 1), rank + 1.0, device=device)
    found = {}

    model.zero_grad()
    model(sample).mean().backward()
    found["one batch a rank: the mean over ranks"] = weight.grad.item()

    model.zero_grad()
    with model.no_sync():
        model(sample).mean().backward()
    model(sample).mean().backward()
    found["two batches a rank: their sum, and its mean"] = weight.grad.item()

    model.zero_grad()
    (model(sample).mean() * world_size).backward()
    found["loss times world size: the sum over ranks"] = weight.grad.item()

    # Four samples a rank, dealt as DistributedSampler deals them: 0 2 4 6 and 1 3 5 7 where there are two ranks.
    *first, last = torch.arange(rank, 4 * world_size, world_size, dtype=torch.float, device=device).reshape(-1, 1, 1)
    model.zero_grad()
    with model.no_sync():
        for sample in first:
            model(sample).sum().backward()
    model(last).sum().backward()
    found[f"samples 0 to {4 * world_size - 1}: summed within a rank, averaged across"] = weight.grad.item()
    return found


def measure() -> dict[str, float]:
    context = psengine.init()
    model = psengine.DistributedDataParallel(nn.Linear(1, 1, bias=False, device=context.device))
    return gradients(model, context.rank, context.world_size, context.device)


@in_native_world
def measure_native(device: torch.device) -> dict[str, float]:
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False, device=device))
    return gradients(model, dist.get_rank(), dist.get_world_size(), device)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--native", action="store_true", help="torch.nn.parallel.DistributedDataParallel")
    found = measure_native() if parser.parse_args(arguments).native else measure()
    for what, gradient in found.items():
        print(f"{what}: {gradient:.1f}")
    return found


if __name__ == "__main__":
    main()
