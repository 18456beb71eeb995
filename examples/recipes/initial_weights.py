"""Start all ranks from pretrained weights. docs/recipes/initial_weights.md

torchrun --nproc-per-node=2 examples/recipes/initial_weights.py [--native]
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from native_world import in_native_world
from small_problem import is_native, make_network, values_of
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel

import psengine


def start(path: Path) -> list[float]:
    context = psengine.init()
    network = make_network(seed=context.rank)  # ranks may differ here
    if psengine.is_main_process():
        load(network, path)  # one rank reads the file
    model = psengine.DistributedDataParallel(network.to(context.device))  # and all ranks get rank 0's weights
    return values_of(model)


@in_native_world
def start_native(device: torch.device, path: Path) -> list[float]:
    network = make_network(seed=dist.get_rank())
    if dist.get_rank() == 0:
        load(network, path)
    return values_of(DistributedDataParallel(network.to(device)))


def load(network: torch.nn.Module, path: Path) -> None:
    # Not to the device that the file names: every process would open cuda:0 for it.
    weights = torch.load(path, map_location="cpu", weights_only=True)
    consume_prefix_in_state_dict_if_present(weights, "module.")  # saved from a wrapped model
    network.load_state_dict(weights)


def main(arguments: list[str] | None = None) -> list[float]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "pretrained.pt"
        pretrained = make_network(seed=99).state_dict()
        torch.save({f"module.{name}": tensor for name, tensor in pretrained.items()}, path)
        values = start_native(path) if is_native(__doc__, arguments) else start(path)
    assert values == values_of(make_network(seed=99))
    print("this rank has the pretrained weights")
    return values


if __name__ == "__main__":
    main()
