"""A training with virtual workers whose bits depend on torch's threads; prints the digest of its weights, and threads.

Argument: a directory for checkpoints.
"""

import hashlib
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import psengine


def main() -> None:
    with psengine.init():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
        dataset = TensorDataset(torch.randn(768, 256), torch.randint(0, 10, (768,)))
        model = psengine.DistributedDataParallel(network, strategy="sync:virtual_workers=4")
        optimizer = psengine.DistributedOptimizer(torch.optim.SGD(network.parameters(), lr=0.1), model)
        model.checkpoint_every(2, sys.argv[1])
        loader = psengine.ElasticLoader(dataset, batch_size=32, seed=0)
        for epoch in loader.epochs(1):
            for step in loader.steps(epoch):
                optimizer.zero_grad()
                for x, y in step.batches:
                    nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        values = b"".join(parameter.detach().numpy().tobytes() for parameter in network.parameters())
    print("weights", hashlib.sha256(values).hexdigest(), "threads", torch.get_num_threads(), flush=True)


if __name__ == "__main__":
    main()
