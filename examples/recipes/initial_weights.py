"""Start all ranks from pretrained weights. docs/recipes/initial_weights.md

torchrun --nproc-per-node=2 examples/recipes/initial_weights.py [--outputs 3] [--native]

The file is of a network with one output. With another number of them the last layer begins anew, on all ranks alike.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from native_world import in_native_world
from small_problem import make_network
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel

import psengine


def start(path: Path, outputs: int) -> dict[str, list]:
    context = psengine.init()
    network = make_network(seed=context.rank, outputs=outputs)  # ranks may differ here
    if psengine.is_main_process():
        load_what_fits(network, path)  # one rank reads the file
    model = psengine.DistributedDataParallel(network.to(context.device))  # and all ranks get rank 0's weights
    return values_by_name(model.module)


@in_native_world
def start_native(device: torch.device, path: Path, outputs: int) -> dict[str, list]:
    network = make_network(seed=dist.get_rank(), outputs=outputs)
    if dist.get_rank() == 0:
        load_what_fits(network, path)
    return values_by_name(DistributedDataParallel(network.to(device)).module)


def load_what_fits(network: nn.Module, path: Path) -> None:
    """Load the weights whose name and shape the network has, and say which it lacks and which were left out."""
    # Not to the device that the file names: every process would open cuda:0 for it.
    weights = torch.load(path, map_location="cpu", weights_only=True)
    consume_prefix_in_state_dict_if_present(weights, "module.")  # saved from a wrapped model
    expected = {name: tensor.shape for name, tensor in network.state_dict().items()}
    # By shape, not by the number of elements: a transposed matrix has as many.
    fitting = {name: tensor for name, tensor in weights.items() if expected.get(name) == tensor.shape}
    if not fitting:
        raise SystemExit(f"{path}: no weight fits (expected {list(expected)}, got {list(weights)})")
    network.load_state_dict(fitting, strict=False)
    for name, tensor in weights.items():
        if name not in expected:
            print(f"left out: {name}, which this network does not have")
        elif name not in fitting:
            print(f"left out: {name} (expected shape {tuple(expected[name])}, got {tuple(tensor.shape)})")
    for name in expected.keys() - weights.keys():
        print(f"not in the file: {name}")
    print(f"loaded {len(fitting)} of {len(expected)} tensors")


def values_by_name(network: nn.Module) -> dict[str, list]:
    return {name: tensor.tolist() for name, tensor in network.state_dict().items()}


def main(arguments: list[str] | None = None) -> dict[str, list]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--native", action="store_true", help="torch.nn.parallel.DistributedDataParallel")
    parser.add_argument("--outputs", type=int, default=1, help="of this network; those of the file: 1 (default: 1)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "pretrained.pt"
        pretrained = make_network(seed=99).state_dict()
        torch.save({f"module.{name}": tensor for name, tensor in pretrained.items()}, path)
        values = (start_native if options.native else start)(path, options.outputs)
    loaded = [name for name, tensor in pretrained.items() if values[name] == tensor.tolist()]
    print(f"this rank has the pretrained {', '.join(loaded)}")
    return values


if __name__ == "__main__":
    main()
