"""What the recipes train: 203 samples, which no number of ranks but 7 and 29 divides, and a network of two layers."""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset


def make_dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(203, 8, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


def make_network(seed: int = 0, outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, outputs))


def values_of(module: nn.Module) -> list[float]:
    """All parameters, one after the other."""
    return [value for parameter in module.parameters() for value in parameter.detach().flatten().tolist()]


def is_native(description: str | None, arguments: list[str] | None) -> bool:
    """Whether the command line chooses a recipe's twin over native DDP."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--native", action="store_true", help="torch.nn.parallel.DistributedDataParallel")
    return bool(parser.parse_args(arguments).native)
