"""Weights and optimizer state on the CPU, compute on the GPU. docs/recipes/cpu_parameters.md

torchrun --nproc-per-node=2 examples/recipes/cpu_parameters.py [--native]

Without a GPU both are on the CPU, in different processes.
"""

import argparse

import torch
import torch.distributed as dist
from native_world import in_native_world
from small_problem import make_dataset, make_network, values_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import psengine


def train() -> list[float]:
    context = psengine.init()
    model = psengine.DistributedDataParallel(make_network().to(context.device), strategy="async:max_staleness=0")
    # Adam's state lies in the server, which rank 0 starts on this host; PSENGINE_SERVERS names others.
    optimizer = psengine.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
    inputs, targets = share(context.rank, context.world_size, context.device)
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()  # gradients go to the server, new weights come back
    assert not optimizer.state, "nothing is kept here"
    print(f"rank {context.rank}: loss {loss.item():.4f} on {context.device}")
    values = values_of(model)
    model.leave()
    return values


@in_native_world
def train_native(device: torch.device) -> list[float]:
    model = DistributedDataParallel(make_network().to(device))
    masters = [nn.Parameter(p.detach().to("cpu", copy=True)) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.01)  # every rank keeps weights and state in host memory
    inputs, targets = share(dist.get_rank(), dist.get_world_size(), device)
    for _ in range(20):
        model.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.cpu()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    print(f"rank {dist.get_rank()}: parameters on {device}, masters on the CPU")
    return values_of(model)


def share(rank: int, world_size: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(tensor[rank::world_size].to(device) for tensor in make_dataset().tensors)


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--native", action="store_true", help="master weights by hand")
    return train_native() if parser.parse_args(arguments).native else train()


if __name__ == "__main__":
    main()
