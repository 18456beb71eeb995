"""Model parallel inside, data parallel outside: a mesh of ranks. docs/recipes/several_devices.md

torchrun --nproc-per-node=4 examples/recipes/hybrid.py [--native]

Ranks 0 and 1 hold the two halves of one replica's hidden units, ranks 2 and 3 those of the other's::

             model ──►
    data     rank 0   rank 1      replica 0, first half of each batch      ─┐ gradients of equal halves are averaged
     │       rank 2   rank 3      replica 1, second half of each batch     ─┘ down the columns
     ▼
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import psengine


class SumOverGroup(torch.autograd.Function):
    """The parts of an activation add up; the whole's gradient is every part's."""

    @staticmethod
    def forward(ctx, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Stage(nn.Module):
    """One rank's part of a network of two layers: some hidden units, and the weights into and out of them."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        enter, leave = nn.Linear(8, 32), nn.Linear(32, 1)
        self.group = mesh.get_group("model")
        part, parts = mesh.get_local_rank("model"), mesh["model"].size()
        self.weight_in = nn.Parameter(enter.weight.detach().chunk(parts)[part].clone())
        self.bias_in = nn.Parameter(enter.bias.detach().chunk(parts)[part].clone())
        self.weight_out = nn.Parameter(leave.weight.detach().chunk(parts, dim=1)[part].contiguous())
        self.bias_out = nn.Parameter(leave.bias.detach().clone())  # each part has it, with the same gradient

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.linear(inputs, self.weight_in, self.bias_in).tanh()
        return SumOverGroup.apply(nn.functional.linear(hidden, self.weight_out), self.group) + self.bias_out


def main(arguments: list[str] | None = None) -> dict[str, list]:
    context = psengine.init()
    if context.world_size % 2:
        raise SystemExit(f"each replica takes two ranks (expected an even number of them, got {context.world_size})")
    shape = (context.world_size // 2, 2)
    mesh = init_device_mesh(context.device.type, shape, mesh_dim_names=("data", "model"))
    wrap = DistributedDataParallel if "--native" in (arguments or ()) else psengine.DistributedDataParallel
    model = wrap(Stage(mesh).to(context.device), device_mesh=mesh["data"])
    replica, replicas = mesh.get_local_rank("data"), mesh["data"].size()
    # By the replica, not by the rank: both parts of one must see the same samples.
    inputs = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))[replica::replicas].to(context.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
        optimizer.step()
    print(f"replica {replica}, part {mesh.get_local_rank('model')}: 5 steps")
    return {name: parameter.tolist() for name, parameter in model.module.named_parameters()}


if __name__ == "__main__":
    main(sys.argv[1:])
    psengine.shutdown()
