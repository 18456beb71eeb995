"""BatchNorm whose batch is that of all ranks, with and without frozen layers. docs/recipes/sync_batch_norm.md

torchrun --nproc-per-node=2 examples/recipes/sync_batch_norm.py [--frozen] [--native]
"""

import argparse

import torch
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


def main(arguments: list[str] | None = None) -> list[list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--native", action="store_true", help="torch.nn.SyncBatchNorm; on GPUs only")
    parser.add_argument("--frozen", action="store_true", help="keep the first two layers as they are")
    options = parser.parse_args(arguments)
    context = psengine.init()
    if options.native and context.device.type == "cpu":
        raise SystemExit("torch.nn.SyncBatchNorm does not run on the CPU; psengine's does: leave out --native")
    convert = nn.SyncBatchNorm.convert_sync_batchnorm if options.native else psengine.convert_sync_batchnorm
    network = convert(make_network()).to(context.device)
    if options.frozen:
        freeze(network[:2])  # before wrapping: parameters without gradients are not exchanged
    wrap = DistributedDataParallel if options.native else psengine.DistributedDataParallel
    model = wrap(network)
    inputs = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    inputs = inputs.double()[context.rank :: context.world_size].to(context.device)  # parts of equal size
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        model.train()
        if options.frozen:
            freeze(network[:2])  # train() has woken the statistics
        optimizer.zero_grad()
        model(inputs).pow(3).mean().backward()
        optimizer.step()
    assert not options.frozen or not network[1].running_mean.any(), "frozen statistics stay as they were"
    print(f"rank {context.rank}: running means {[round(value, 4) for value in network[4].running_mean.tolist()]}")
    return [tensor.flatten().tolist() for tensor in network.state_dict().values()]


if __name__ == "__main__":
    main()
    psengine.shutdown()
