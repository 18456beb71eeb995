"""Several devices inside one process. docs/recipes/several_devices.md

torchrun --nproc-per-node=2 examples/recipes/several_devices.py [--inside split|replicas] [--native]

split     the layers of one model lie on two devices
replicas  torch.nn.DataParallel splits each batch over two devices

A process takes GPUs 2 * local rank and the next; where there are not enough of them both devices are the CPU.
"""

import argparse
import os

import torch
import torch.distributed as dist
from small_problem import make_dataset, make_network, values_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import psengine


class Split(nn.Module):
    def __init__(self, layers: nn.Sequential, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.first, self.second = layers[:2].to(first), layers[2:].to(second)
        self.devices = first, second

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs.to(self.devices[0])).to(self.devices[1]))


def choose_devices() -> tuple[torch.device, torch.device]:
    first = 2 * int(os.environ.get("LOCAL_RANK", 0))
    if torch.cuda.device_count() < 2 * int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        return torch.device("cpu"), torch.device("cpu")
    return torch.device("cuda", first), torch.device("cuda", first + 1)


def make_inside(kind: str) -> nn.Module:
    devices = choose_devices()
    if kind == "split":
        return Split(make_network(), *devices)
    # Without GPUs torch.nn.DataParallel is the module itself.
    device_ids = None if devices[0].type == "cpu" else list(devices)
    return nn.DataParallel(make_network().to(devices[0]), device_ids)


def train(kind: str) -> list[float]:
    context = psengine.init("gloo" if choose_devices()[0].type == "cpu" else "nccl")
    model = psengine.DistributedDataParallel(make_inside(kind))  # no device_ids: inputs are the module's business
    return take_steps(model, context.rank, context.world_size)


def train_native(kind: str) -> list[float]:
    dist.init_process_group("gloo" if choose_devices()[0].type == "cpu" else "nccl")
    values = take_steps(DistributedDataParallel(make_inside(kind)), dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
    return values


def take_steps(model: nn.Module, rank: int, world_size: int) -> list[float]:
    inputs, targets = (tensor[:200][rank::world_size] for tensor in make_dataset().tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        outputs = model(inputs)
        nn.functional.mse_loss(outputs, targets.to(outputs.device)).backward()
        optimizer.step()
    print(f"rank {rank}: parameters on {sorted({str(p.device) for p in model.parameters()})}")
    return values_of(model)


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--native", action="store_true", help="torch.nn.parallel.DistributedDataParallel")
    parser.add_argument("--inside", choices=["split", "replicas"], default="split")
    options = parser.parse_args(arguments)
    return train_native(options.inside) if options.native else train(options.inside)


if __name__ == "__main__":
    main()
