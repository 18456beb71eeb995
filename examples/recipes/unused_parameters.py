"""A model of which each step uses a part: a generator and a discriminator. docs/recipes/unused_parameters.md

torchrun --nproc-per-node=2 examples/recipes/unused_parameters.py [--native]
"""

import torch
import torch.distributed as dist
from native_world import in_native_world
from small_problem import is_native, make_dataset, values_of
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


def train() -> list[float]:
    context = psengine.init()
    network = Adversaries().to(context.device)
    model = psengine.DistributedDataParallel(network, find_unused_parameters=True)
    return take_steps(model, context.rank, context.world_size, context.device)


@in_native_world
def train_native(device: torch.device) -> list[float]:
    model = DistributedDataParallel(Adversaries().to(device), find_unused_parameters=True)
    return take_steps(model, dist.get_rank(), dist.get_world_size(), device)


def take_steps(model: nn.Module, rank: int, world_size: int, device: torch.device) -> list[float]:
    real = make_dataset().tensors[0][rank::world_size].to(device)
    torch.manual_seed(rank)
    optimizers = {
        part: torch.optim.SGD(getattr(model.module, part).parameters(), lr=0.1)
        for part in ("generator", "discriminator")
    }
    for _ in range(3):
        model.zero_grad()
        nn.functional.softplus(-model(real)).mean().backward()  # the generator takes no part in this
        assert all(p.grad is None for p in model.module.generator.parameters())
        optimizers["discriminator"].step()

        model.zero_grad()
        noise = torch.randn(32, 4).to(device)
        nn.functional.softplus(-model(real, noise)).mean().backward()
        optimizers["generator"].step()
    print(f"rank {rank}: 3 steps of each")
    return values_of(model)


def main(arguments: list[str] | None = None) -> list[float]:
    return train_native() if is_native(__doc__, arguments) else train()


if __name__ == "__main__":
    main()
