"""Several devices inside one process. docs/recipes/several_devices.md

torchrun --nproc-per-node=2 examples/recipes/several_devices.py [--inside split|replicas] [--native]

split     the layers of one model lie on two devices
replicas  torch.nn.DataParallel splits each batch over two devices

A process takes GPUs 2 * local rank and the next; where there are not enough of them both devices are the CPU.
"""

import argparse

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import psengine


class Split(nn.Module):
    """Activations move from one device to the next."""

    def __init__(self, layers: nn.Sequential, devices: tuple[torch.device, torch.device]) -> None:
        super().__init__()
        self.first, self.second = layers[:2].to(devices[0]), layers[2:].to(devices[1])
        self.devices = devices

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs.to(self.devices[0])).to(self.devices[1]))


def choose_devices(context: psengine.Context) -> tuple[torch.device, torch.device]:
    if torch.cuda.device_count() < 2 * context.local_world_size:
        return torch.device("cpu"), torch.device("cpu")
    return torch.device("cuda", 2 * context.local_rank), torch.device("cuda", 2 * context.local_rank + 1)


def main(arguments: list[str] | None = None) -> list[list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--native", action="store_true", help="torch.nn.parallel.DistributedDataParallel")
    parser.add_argument("--inside", choices=["split", "replicas"], default="split")
    options = parser.parse_args(arguments)
    context = psengine.init()
    devices = choose_devices(context)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    if options.inside == "split":
        inside: nn.Module = Split(layers, devices)
    else:  # without GPUs torch.nn.DataParallel is the module itself
        inside = nn.DataParallel(layers.to(devices[0]), None if devices[0].type == "cpu" else list(devices))
    wrap = DistributedDataParallel if options.native else psengine.DistributedDataParallel
    model = wrap(inside)  # no device_ids: inputs are the module's business
    inputs = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))[context.rank :: context.world_size]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        outputs = model(inputs)
        nn.functional.mse_loss(outputs, inputs.sum(1, keepdim=True).to(outputs.device)).backward()
        optimizer.step()
    print(f"rank {context.rank}: parameters on {sorted({str(p.device) for p in model.parameters()})}")
    return [parameter.flatten().tolist() for parameter in model.parameters()]


if __name__ == "__main__":
    main()
    psengine.shutdown()
