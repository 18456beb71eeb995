"""Start all ranks from pretrained weights.

torchrun --nproc-per-node=2 examples/recipes/initial_weights.py [--outputs 3] [--native]

The file is of a network with one output. With another number of them the last layer begins anew, on all ranks alike.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel

import psengine


def make_network(seed: int, outputs: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, outputs))


def load_what_fits(network: nn.Module, path: Path) -> None:
    """Load the weights whose name and shape the network has; say which were left out."""
    # Not to the device that the file names: every process would open cuda:0 for it.
    weights = torch.load(path, map_location="cpu", weights_only=True)
    consume_prefix_in_state_dict_if_present(weights, "module.")  # saved from a wrapped model
    expected = {name: tensor.shape for name, tensor in network.state_dict().items()}
    # By shape, not by the number of elements: a transposed matrix has as many.
    fitting = {name: tensor for name, tensor in weights.items() if expected.get(name) == tensor.shape}
    network.load_state_dict(fitting, strict=False)
    print(f"loaded {sorted(fitting)}; left out {sorted(weights.keys() - fitting.keys())}")


def main(arguments: list[str] | None = None) -> dict[str, list]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--native", action="store_true", help="torch.nn.parallel.DistributedDataParallel")
    parser.add_argument("--outputs", type=int, default=1, help="of this network; those of the file: 1 (default: 1)")
    options = parser.parse_args(arguments)
    context = psengine.init()
    network = make_network(seed=context.rank, outputs=options.outputs)  # ranks may differ here
    if context.is_main_process:  # one rank reads the file
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "pretrained.pt"
            torch.save({f"module.{name}": tensor for name, tensor in make_network(99, 1).state_dict().items()}, path)
            load_what_fits(network, path)
    wrap = DistributedDataParallel if options.native else psengine.DistributedDataParallel
    model = wrap(network.to(context.device))  # and all ranks get rank 0's weights
    return {name: tensor.tolist() for name, tensor in model.module.state_dict().items()}


if __name__ == "__main__":
    main()
    psengine.shutdown()
