"""Weights and optimizer state on the CPU, compute on the GPU. docs/recipes/cpu_parameters.md

torchrun --nproc-per-node=2 examples/recipes/cpu_parameters.py [--native]

Without a GPU both are on the CPU, in different processes.
"""

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import psengine


def train(network: nn.Module, inputs: torch.Tensor) -> None:
    model = psengine.DistributedDataParallel(network, strategy="async:max_staleness=0")
    # Adam's state lies in the server, which rank 0 starts on this host; PSENGINE_SERVERS names others.
    optimizer = psengine.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
        optimizer.step()  # gradients go to the server, new weights come back
    assert not optimizer.state, "nothing is kept here"
    model.leave()


def train_native(network: nn.Module, inputs: torch.Tensor) -> None:
    model = DistributedDataParallel(network)
    masters = [nn.Parameter(p.detach().to("cpu", copy=True)) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.01)  # every rank keeps weights and state in host memory
    for _ in range(20):
        model.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.cpu()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)


def main(arguments: list[str] | None = None) -> list[list[float]]:
    context = psengine.init()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(context.device)
    inputs = torch.randn(200, 8)[context.rank :: context.world_size].to(context.device)
    way = train_native if "--native" in (arguments or ()) else train
    way(network, inputs)
    print(f"rank {context.rank}: 20 steps on {context.device}")
    return [parameter.flatten().tolist() for parameter in network.parameters()]


if __name__ == "__main__":
    main(sys.argv[1:])
    psengine.shutdown()
