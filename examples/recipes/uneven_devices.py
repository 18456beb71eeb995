"""Give a slower device a smaller share, and weigh gradients by samples. docs/recipes/uneven_devices.md

torchrun --nproc-per-node=2 examples/recipes/uneven_devices.py [--shares 1 3] [--native]
"""

import argparse

import torch
import torch.distributed as dist
from native_world import in_native_world
from small_problem import make_dataset, make_network, values_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import psengine

GLOBAL_BATCH_SIZE = 32


def train(shares: list[float]) -> list[float]:
    context = psengine.init()
    dataset = make_dataset()
    sampler = psengine.ProportionalSampler(dataset, shares)
    loader = DataLoader(dataset, sampler=sampler.batches(GLOBAL_BATCH_SIZE), batch_size=None)
    model = psengine.DistributedDataParallel(make_network().to(context.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            model.batch_weight(len(inputs))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs.to(context.device)), targets.to(context.device)).backward()
            optimizer.step()
    print(f"rank {context.rank}: batches of {sampler.batches(GLOBAL_BATCH_SIZE).batch_size} of {GLOBAL_BATCH_SIZE}")
    return values_of(model)


@in_native_world
def train_native(device: torch.device, shares: list[float]) -> list[float]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs, targets = make_dataset().tensors
    model = DistributedDataParallel(make_network().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        permutation = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(epoch))
        for batch in permutation.split(GLOBAL_BATCH_SIZE):
            bounds = [round(len(batch) * sum(shares[:r]) / sum(shares)) for r in (rank, rank + 1)]
            mine = batch[slice(*bounds)]  # must not be empty on any rank
            count = torch.tensor([len(mine)], device=device)
            dist.all_reduce(count)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs[mine].to(device)), targets[mine].to(device))
            # The wrapper divides by the number of ranks; this loss undoes that, and weighs.
            (loss * len(mine) * world_size / count).backward()
            optimizer.step()
    print(f"rank {rank}: {len(mine)} samples of the last batch of {len(batch)}")
    return values_of(model)


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--native", action="store_true", help="torch.nn.parallel.DistributedDataParallel")
    parser.add_argument("--shares", type=float, nargs="+", default=[1, 3], help="one for each rank (default: 1 3)")
    options = parser.parse_args(arguments)
    return train_native(options.shares) if options.native else train(options.shares)


if __name__ == "__main__":
    main()
