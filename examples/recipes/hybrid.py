"""Model parallel inside, data parallel outside: a mesh of ranks. docs/recipes/several_devices.md

torchrun --nproc-per-node=4 examples/recipes/hybrid.py [--native]

Ranks 0 and 1 hold the two halves of one replica's hidden units, ranks 2 and 3 those of the other's::

             model ──►
    data     rank 0   rank 1      replica 0, first half of each batch      ─┐ gradients of equal halves are averaged
     │       rank 2   rank 3      replica 1, second half of each batch     ─┘ down the columns
     ▼
"""

import torch
import torch.distributed as dist
from native_world import in_native_world
from small_problem import is_native, make_dataset, make_network
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
    """One rank's part of ``make_network()``: some of its hidden units, and the weights into and out of them."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group = mesh.get_group("model")
        part, parts = mesh.get_local_rank("model"), mesh["model"].size()
        enter, _, leave = make_network()
        self.weight_in = nn.Parameter(enter.weight.detach().chunk(parts, dim=0)[part].clone())
        self.bias_in = nn.Parameter(enter.bias.detach().chunk(parts)[part].clone())
        columns = leave.weight.detach().chunk(parts, dim=1)[part]
        self.weight_out = nn.Parameter(columns.clone(memory_format=torch.contiguous_format))
        self.bias_out = nn.Parameter(leave.bias.detach().clone())  # each part has it, with the same gradient

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.linear(inputs, self.weight_in, self.bias_in).tanh()
        return SumOverGroup.apply(nn.functional.linear(hidden, self.weight_out), self.group) + self.bias_out


def train() -> dict[str, list]:
    context = psengine.init()
    mesh = make_mesh(context.device, context.world_size)
    # All parts of replica 0 start alike on every run; wrapping makes replica 1's the same.
    model = psengine.DistributedDataParallel(Stage(mesh).to(context.device), device_mesh=mesh["data"])
    return take_steps(model, mesh, context.device)


@in_native_world
def train_native(device: torch.device) -> dict[str, list]:
    mesh = make_mesh(device, dist.get_world_size())
    return take_steps(DistributedDataParallel(Stage(mesh).to(device), device_mesh=mesh["data"]), mesh, device)


def make_mesh(device: torch.device, world_size: int) -> DeviceMesh:
    if world_size % 2:
        raise SystemExit(f"each replica takes two ranks (expected an even number of them, got {world_size})")
    return init_device_mesh(device.type, (world_size // 2, 2), mesh_dim_names=("data", "model"))


def take_steps(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> dict[str, list]:
    replica, replicas = mesh.get_local_rank("data"), mesh["data"].size()
    # By the replica, not by the rank: both parts of one must see the same samples.
    inputs, targets = (tensor[:200][replica::replicas].to(device) for tensor in make_dataset().tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    print(f"replica {replica}, part {mesh.get_local_rank('model')}: 5 steps")
    return {name: parameter.tolist() for name, parameter in model.module.named_parameters()}


def main(arguments: list[str] | None = None) -> dict[str, list]:
    return train_native() if is_native(__doc__, arguments) else train()


if __name__ == "__main__":
    main()
