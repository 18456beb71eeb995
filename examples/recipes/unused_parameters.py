"""A model of which each step uses a part: a generator and a discriminator. docs/recipes/unused_parameters.md

torchrun --nproc-per-node=2 examples/recipes/unused_parameters.py [--native]
"""

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import psengine


class Adversaries(nn.Module):
    """``forward`` uses one of the two, or both: everything runs through the wrapper that exchanges gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, samples: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        return self.discriminator(samples if noise is None else self.generator(noise))


def main(arguments: list[str] | None = None) -> list[list[float]]:
    context = psengine.init()
    wrap = DistributedDataParallel if "--native" in (arguments or ()) else psengine.DistributedDataParallel
    network = Adversaries().to(context.device)
    model = wrap(network, find_unused_parameters=True)
    torch.manual_seed(1 + context.rank)
    real = torch.randn(32, 8).to(context.device)
    step_generator = torch.optim.SGD(network.generator.parameters(), lr=0.1).step
    step_discriminator = torch.optim.SGD(network.discriminator.parameters(), lr=0.1).step
    for _ in range(3):
        model.zero_grad()
        nn.functional.softplus(-model(real)).mean().backward()  # the generator takes no part in this
        assert all(p.grad is None for p in network.generator.parameters())
        step_discriminator()

        model.zero_grad()
        noise = torch.randn(32, 4).to(context.device)
        nn.functional.softplus(-model(real, noise)).mean().backward()
        step_generator()
    print(f"rank {context.rank}: 3 steps of each")
    return [parameter.flatten().tolist() for parameter in model.parameters()]


if __name__ == "__main__":
    main(sys.argv[1:])
    psengine.shutdown()
