"""DistributedSampler, BatchSampler and set_epoch. docs/recipes/samplers_and_epochs.md

torchrun --nproc-per-node=2 examples/recipes/samplers_and_epochs.py [--native]
"""

import torch
import torch.distributed as dist
from native_world import in_native_world
from small_problem import is_native, make_dataset, make_network, values_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import psengine

BATCH_SIZE = 16


def train() -> list[float]:
    context = psengine.init()
    model = psengine.DistributedDataParallel(make_network().to(context.device))
    return take_epochs(model, context.rank, context.world_size, context.device)


@in_native_world
def train_native(device: torch.device) -> list[float]:
    model = DistributedDataParallel(make_network().to(device))
    return take_epochs(model, dist.get_rank(), dist.get_world_size(), device)


def take_epochs(model: nn.Module, rank: int, world_size: int, device: torch.device) -> list[float]:
    dataset = make_dataset()
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=7)
    batches = BatchSampler(sampler, BATCH_SIZE, drop_last=False)
    # The sampler yields lists, so that the dataset is asked for a whole batch at once; batch_size=None keeps it.
    loader = DataLoader(dataset, sampler=batches, batch_size=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first_batches = []
    for epoch in range(2):
        sampler.set_epoch(epoch)  # left out, every epoch has the order of epoch 0
        first_batches.append(next(iter(batches)))
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs.to(device)), targets.to(device)).backward()
            optimizer.step()
    assert first_batches[0] != first_batches[1]
    print(f"rank {rank}: {len(loader)} batches an epoch; they begin with samples {[b[0] for b in first_batches]}")
    return values_of(model)


def main(arguments: list[str] | None = None) -> list[float]:
    return train_native() if is_native(__doc__, arguments) else train()


if __name__ == "__main__":
    main()
