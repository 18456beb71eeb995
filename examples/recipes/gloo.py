"""Train where NCCL is missing: on CPUs, or with GPUs that NCCL does not reach. docs/recipes/gloo.md

torchrun --nproc-per-node=2 examples/recipes/gloo.py [--native]
"""

import gc

import torch
import torch.distributed as dist
from small_problem import is_native, make_dataset, make_network, values_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import psengine


def train() -> list[float]:
    context = psengine.init("gloo")  # without an argument: nccl where there is a GPU, else gloo
    model = psengine.DistributedDataParallel(make_network().to(context.device))
    return take_steps(model, context.rank, context.world_size, context.device)


def train_native() -> list[float]:
    dist.init_process_group("gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    model = DistributedDataParallel(make_network().to(device))
    values = take_steps(model, dist.get_rank(), dist.get_world_size(), device)
    # First the model: one that outlives its group may wait for the group's threads for ever when it goes.
    del model
    gc.collect()
    dist.destroy_process_group()
    return values


def take_steps(model: nn.Module, rank: int, world_size: int, device: torch.device) -> list[float]:
    inputs, targets = (tensor[rank::world_size].to(device) for tensor in make_dataset().tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    print(f"rank {rank} of {world_size}: backend {dist.get_backend()}, parameters on {device}")
    return values_of(model)


def main(arguments: list[str] | None = None) -> list[float]:
    return train_native() if is_native(__doc__, arguments) else train()


if __name__ == "__main__":
    main()
