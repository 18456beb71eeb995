"""BalancedDataParallel's gpu0_bsz as shares, and the memory it saves. docs/recipes/uneven_devices.md

torchrun --nproc-per-node=2 examples/recipes/balanced_memory.py [--gpu0-bsz 256] [--native]

A step has 2,048 samples over all ranks. Rank 0 takes gpu0_bsz of them, the others split the rest evenly.
"""

import argparse

import torch
import torch.distributed as dist
from native_world import in_native_world
from step_memory import StepMemory, measured_memory
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import psengine

STEPS, WIDTH, LAYERS = 2, 256, 16


def shares_of(gpu0_bsz: int, batch_size: int, world_size: int) -> list[float]:
    """The ranks' samples of a step, as BalancedDataParallel(gpu0_bsz, ...) splits them."""
    if not 0 < gpu0_bsz < batch_size or world_size < 2:
        raise SystemExit(
            f"--gpu0-bsz is rank 0's part of {batch_size} samples (expected 1 to {batch_size - 1} on two ranks or"
            f" more, got {gpu0_bsz} on {world_size}). For a rank without samples start one rank fewer"
        )
    return [gpu0_bsz] + [(batch_size - gpu0_bsz) / (world_size - 1)] * (world_size - 1)


def make_dataset(batch_size: int) -> TensorDataset:
    inputs = torch.randn(batch_size * STEPS, WIDTH, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sin())


def make_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def train(gpu0_bsz: int, batch_size: int) -> dict[str, object]:
    context = psengine.init()
    dataset = make_dataset(batch_size)
    sampler = psengine.ProportionalSampler(dataset, shares_of(gpu0_bsz, batch_size, context.world_size))
    loader = DataLoader(dataset, sampler=sampler.batches(batch_size), batch_size=None)
    model = psengine.DistributedDataParallel(make_network().to(context.device))
    with measured_memory(model.module, context.device) as memory:
        for inputs, targets in loader:
            model.batch_weight(len(inputs))
            nn.functional.mse_loss(model(inputs.to(context.device)), targets.to(context.device)).backward()
    return report(context.rank, len(inputs), memory, model.module)


@in_native_world
def train_native(device: torch.device, gpu0_bsz: int, batch_size: int) -> dict[str, object]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shares = shares_of(gpu0_bsz, batch_size, world_size)
    inputs, targets = make_dataset(batch_size).tensors
    model = DistributedDataParallel(make_network().to(device))
    permutation = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    with measured_memory(model.module, device) as memory:
        for batch in permutation.split(batch_size):
            mine = batch[slice(*(round(sum(shares[:r])) for r in (rank, rank + 1)))]
            loss = nn.functional.mse_loss(model(inputs[mine].to(device)), targets[mine].to(device))
            # The wrapper divides by the number of ranks; this loss undoes that, and weighs.
            (loss * len(mine) * world_size / len(batch)).backward()
    return report(rank, len(mine), memory, model.module)


def report(rank: int, batch: int, memory: StepMemory, network: nn.Module) -> dict[str, object]:
    print(
        f"rank {rank}: batches of {batch}, activations {memory.activations / 2**20:.1f} MiB, peak"
        f" {memory.peak / 2**20:.0f} MiB",
        flush=True,
    )
    gradients = [value for parameter in network.parameters() for value in parameter.grad.flatten()[:10].tolist()]
    return {"batch": batch, "activations": memory.activations, "peak": memory.peak, "gradients": gradients}


def main(arguments: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--native", action="store_true", help="torch.nn.parallel.DistributedDataParallel")
    parser.add_argument("--gpu0-bsz", type=int, default=256, metavar="N", help="rank 0's samples (default: 256)")
    parser.add_argument("--batch-size", type=int, default=2048, metavar="N", help="of all ranks (default: 2048)")
    options = parser.parse_args(arguments)
    return (train_native if options.native else train)(options.gpu0_bsz, options.batch_size)


if __name__ == "__main__":
    main()
