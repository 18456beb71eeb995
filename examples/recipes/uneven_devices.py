"""Give a slower device a smaller share, and weigh gradients by samples. docs/recipes/uneven_devices.md

torchrun --nproc-per-node=2 examples/recipes/uneven_devices.py [--shares 1 3] [--native]
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import psengine

BATCH_SIZE = 32  # of all ranks


def train(network: nn.Module, dataset: TensorDataset, shares: list[float], device: torch.device) -> None:
    sampler = psengine.ProportionalSampler(dataset, shares)
    loader = DataLoader(dataset, sampler=sampler.batches(BATCH_SIZE), batch_size=None)
    model = psengine.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            model.batch_weight(len(inputs))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs.to(device)), targets.to(device)).backward()
            optimizer.step()


def train_native(network: nn.Module, dataset: TensorDataset, shares: list[float], device: torch.device) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs, targets = dataset.tensors
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        permutation = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(epoch))
        for batch in permutation.split(BATCH_SIZE):
            bounds = [round(len(batch) * sum(shares[:r]) / sum(shares)) for r in (rank, rank + 1)]
            mine = batch[slice(*bounds)]  # must not be empty on any rank
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs[mine].to(device)), targets[mine].to(device))
            # The wrapper divides by the number of ranks; this loss undoes that, and weighs.
            (loss * len(mine) * world_size / len(batch)).backward()
            optimizer.step()


def main(arguments: list[str] | None = None) -> list[list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--native", action="store_true", help="torch.nn.parallel.DistributedDataParallel")
    parser.add_argument("--shares", type=float, nargs="+", default=[1, 3], help="one for each rank (default: 1 3)")
    options = parser.parse_args(arguments)
    context = psengine.init()
    inputs = torch.randn(203, 8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(context.device)
    way = train_native if options.native else train
    way(network, dataset, options.shares, context.device)
    print(f"rank {context.rank}: a share of {options.shares[context.rank]:g} in {sum(options.shares):g}")
    return [parameter.flatten().tolist() for parameter in network.parameters()]


if __name__ == "__main__":
    main()
    psengine.shutdown()
