"""Gradients add up within a process and are averaged across processes. docs/recipes/sum_and_mean.md

torchrun --nproc-per-node=2 examples/recipes/sum_and_mean.py [--native]

The model is one weight and each rank's sample is rank + 1, so every kind of average has a number of its own.
"""

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import psengine


def main(arguments: list[str] | None = None) -> dict[str, float]:
    context = psengine.init()
    rank, world_size, device = context.rank, context.world_size, context.device
    wrap = DistributedDataParallel if "--native" in (arguments or ()) else psengine.DistributedDataParallel
    model = wrap(nn.Linear(1, 1, bias=False, device=device))
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
        for one in first:
            model(one).sum().backward()
    model(last).sum().backward()
    found[f"samples 0 to {4 * world_size - 1}: summed within a rank, averaged across"] = weight.grad.item()
    for what, gradient in found.items():
        psengine.print(f"{what}: {gradient:.1f}")
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
    psengine.shutdown()
