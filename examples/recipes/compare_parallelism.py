"""Data, model and hybrid parallelism: time and memory of the same model, each way. docs/recipes/several_devices.md

torchrun --nproc-per-node=4 examples/recipes/compare_parallelism.py [--ways hybrid] [--native]

With four ranks ("model": several ranks hold the parts of one replica; "data": replicas share each batch)::

    data    4 replicas of 1 rank     every rank has the whole model and a quarter of each batch
    model   1 replica of 4 ranks     every rank has a quarter of each layer and the whole batch
    hybrid  2 replicas of 2 ranks    every rank has half of each layer and half of each batch
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from hybrid import SumOverGroup
from native_world import in_native_world
from step_memory import measured_memory
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import psengine

MIB = 2**20


class CopyToGroup(torch.autograd.Function):
    """Each part uses the whole activation; the gradients that come back add up."""

    @staticmethod
    def forward(ctx, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Block(nn.Module):
    """One rank's part of ``x + leave(gelu(enter(x)))``: some hidden units, and the weights into and out of them."""

    def __init__(self, width: int, hidden: int, part: int, parts: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        enter, leave = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.weight_in = nn.Parameter(enter.weight.detach().chunk(parts)[part].clone())
        self.bias_in = nn.Parameter(enter.bias.detach().chunk(parts)[part].clone())
        columns = leave.weight.detach().chunk(parts, dim=1)[part]
        self.weight_out = nn.Parameter(columns.clone(memory_format=torch.contiguous_format))
        self.bias_out = nn.Parameter(leave.bias.detach().clone())  # each part has it, with the same gradient

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        whole = CopyToGroup.apply(inputs, self.group)
        hidden = nn.functional.gelu(nn.functional.linear(whole, self.weight_in, self.bias_in))
        return inputs + SumOverGroup.apply(nn.functional.linear(hidden, self.weight_out), self.group) + self.bias_out


def ways_of(world_size: int) -> dict[str, tuple[int, int]]:
    """The name of each way -> (replicas, ranks of a replica)."""
    if world_size < 2:
        raise SystemExit(f"the ways differ with two ranks or more (got {world_size}). Fix: torchrun --nproc-per-node=4")
    ways = {"data": (world_size, 1), "model": (1, world_size)}
    if world_size >= 4 and world_size % 2 == 0:
        ways["hybrid"] = (world_size // 2, 2)
    return ways


def train(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    context = psengine.init()
    return compare(psengine.DistributedDataParallel, context.world_size, context.device, options)


@in_native_world
def train_native(device: torch.device, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    return compare(DistributedDataParallel, dist.get_world_size(), device, options)


def compare(
    wrap: Callable[..., nn.Module], world_size: int, device: torch.device, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    found = {}
    ways = ways_of(world_size)
    if not set(options.ways or ()) <= ways.keys():
        raise SystemExit(
            f"--ways: expected some of {', '.join(ways)} with {world_size} ranks, got {' '.join(options.ways)}"
        )
    for way in options.ways or ways:
        shape = ways[way]
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "model"))
        part, parts, group = mesh.get_local_rank("model"), shape[1], mesh.get_group("model")
        torch.manual_seed(0)
        blocks = [Block(options.width, options.hidden, part, parts, group) for _ in range(options.layers)]
        model = wrap(nn.Sequential(*blocks).to(device), device_mesh=mesh["data"])
        found[way] = take_steps(model, mesh, device, options)
        if dist.get_rank() == 0:
            row = found[way]
            # On the CPU a process keeps memory that it freed, so only its first way has a peak of its own.
            is_alone = len(found) == 1 or device.type == "cuda"
            peak = f", peak {row['peak'] / MIB:.0f} MiB" if is_alone else ""
            print(
                f"{way:6} {row['seconds'] * 1e3:6.0f} ms a step; a rank has {row['state'] / MIB:.1f} MiB of weights,"
                f" gradients and optimizer state, {row['activations'] / MIB:.1f} MiB of activations{peak}; loss"
                f" {row['loss']:.6f}",
                flush=True,
            )
    return found


def take_steps(
    model: nn.Module, mesh: DeviceMesh, device: torch.device, options: argparse.Namespace
) -> dict[str, float]:
    """Bytes and seconds of the rank that takes most; the loss over the whole batch."""
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(options.batch_size, options.width, generator=generator)
    # By the replica, not by the rank: all parts of one must see the same samples.
    inputs = batch.chunk(mesh["data"].size())[mesh.get_local_rank("data")].to(device)
    targets = inputs.sin()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seconds = []
    with measured_memory(model.module, device) as memory:
        for _ in range(options.steps):
            dist.barrier()
            started_s = time.monotonic()
            optimizer.zero_grad(set_to_none=False)
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.monotonic() - started_s)
    tensors = [tensor for kept in optimizer.state.values() for tensor in kept.values() if tensor.dim() > 0]
    tensors += [tensor for parameter in model.parameters() for tensor in (parameter, parameter.grad)]
    state = sum(tensor.nbytes for tensor in tensors)
    numbers = [float(state), float(memory.activations), float(memory.peak), statistics.median(seconds[1:] or seconds)]
    largest = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    mean_loss = loss.detach().double() / dist.get_world_size()
    dist.all_reduce(mean_loss)
    names = ("state", "activations", "peak", "seconds")
    return {**dict(zip(names, largest.tolist(), strict=True)), "loss": mean_loss.item()}


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--native", action="store_true", help="torch.nn.parallel.DistributedDataParallel")
    add = parser.add_argument
    add("--ways", nargs="+", metavar="WAY", help="some of data, model, hybrid (default: all)")
    add("--width", type=int, default=512, help="of the activations between blocks (default: 512)")
    add("--hidden", type=int, default=2048, help="units of a block, split over a replica's ranks (default: 2048)")
    add("--layers", type=int, default=8, help="blocks (default: 8)")
    add("--batch-size", type=int, default=256, help="samples of a step, split over replicas (default: 256)")
    add("--steps", type=int, default=6, help="of each way; the first is not timed (default: 6)")
    options = parser.parse_args(arguments)
    return (train_native if options.native else train)(options)


if __name__ == "__main__":
    main()
