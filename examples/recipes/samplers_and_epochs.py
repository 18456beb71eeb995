"""DistributedSampler, BatchSampler and set_epoch.

torchrun --nproc-per-node=2 examples/recipes/samplers_and_epochs.py [--native]
"""

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import psengine

BATCH_SIZE = 16


def main(arguments: list[str] | None = None) -> list[list[float]]:
    context = psengine.init()
    inputs = torch.randn(203, 8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    torch.manual_seed(0)
    wrap = DistributedDataParallel if "--native" in (arguments or ()) else psengine.DistributedDataParallel
    model = wrap(nn.Linear(8, 1).to(context.device))
    sampler = DistributedSampler(dataset, context.workers, context.worker, shuffle=True, seed=7)
    batches = BatchSampler(sampler, BATCH_SIZE, drop_last=False)
    # The sampler yields lists, so that the dataset is asked for a whole batch at once; batch_size=None keeps it.
    loader = DataLoader(dataset, sampler=batches, batch_size=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first_batches = []
    for epoch in range(2):
        sampler.set_epoch(epoch)  # left out, every epoch has the order of epoch 0
        first_batches.append(next(iter(batches)))
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x.to(context.device)), y.to(context.device)).backward()
            optimizer.step()
    assert first_batches[0] != first_batches[1]
    print(f"rank {context.rank}: {len(loader)} batches an epoch, first samples {[batch[0] for batch in first_batches]}")
    return [parameter.flatten().tolist() for parameter in model.parameters()]


if __name__ == "__main__":
    main(sys.argv[1:])
    psengine.shutdown()
