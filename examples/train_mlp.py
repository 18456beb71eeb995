"""The first MNIST example on several hosts: a perceptron (784-256-10), batches of 64 for each rank, SGD with rate 0.01.

On both hosts, where node-0 is one of them:
torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node-0:29400 examples/train_mlp.py [--native]
psengine run --nnodes 2 --workers 1 --rdzv-endpoint node-0:29400 examples/train_mlp.py

One process with the same steps, of which each takes the batches of both ranks:
python examples/train_mlp.py --batch-size 128

The images are Fashion-MNIST's, which stand for MNIST's: as many, as large, of as many classes. Debian's package
dataset-fashion-mnist brings them; without it, scikit-learn's digits of 8x8 pixels are used.
docs/recipes/several_hosts.md has the results.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path

import torch
from image_accuracy import evaluate
from image_data import load_data
from image_network import ImagePerceptron
from image_options import OptionParser, positive_float, positive_int, seed
from rank_errors import UserError, on_all_ranks, run_to_the_end
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import psengine

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package


def main() -> int:
    return run_to_the_end(train)


def parse_options() -> argparse.Namespace:
    parser = OptionParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--native", action="store_true", help="wrap by torch.nn.parallel.DistributedDataParallel")
    add(
        "--data", type=Path, metavar="DIR", help=f"MNIST-like images as IDX files (default: {FASHION_MNIST}, or digits)"
    )
    add("--batch-size", type=positive_int, default=64, metavar="N", help="images of each rank's step (default: 64)")
    add("--epochs", type=positive_int, default=5, metavar="N", help="default: 5")
    add("--learning-rate", type=positive_float, default=0.01, metavar="X", help="default: 0.01")
    add("--seed", type=seed, default=0, metavar="N", help="of the first weights and the order of images (default: 0)")
    options = parser.parse_args()
    if options.data is None and FASHION_MNIST.is_dir():
        options.data = FASHION_MNIST
    return options


def train() -> int:
    options = parse_options()
    context = psengine.init()
    rank, world_size, device = context.rank, context.world_size, context.device
    print(f"rank {rank} of {world_size} on {context.hostname}", flush=True)
    data = on_all_ranks(lambda: load_data(options.data))
    most = len(data.train) // world_size
    if options.batch_size > most:
        raise UserError(
            f"--batch-size: each of {world_size} ranks takes a part of {len(data.train)} images (expected batches of at"
            f" most {most}, got {options.batch_size})"
        )
    if rank == 0:
        source = options.data or "scikit-learn's digits"
        rows, columns = data.train.tensors[0].shape[2:]
        print(f"{len(data.train)} images of {rows}x{columns} from {source}, {data.classes} classes", flush=True)
    torch.manual_seed(options.seed)
    network = ImagePerceptron(data.train.tensors[0][0].numel(), data.classes).to(device)
    wrap = nn.parallel.DistributedDataParallel if options.native else psengine.DistributedDataParallel
    model = wrap(network)
    sampler = DistributedSampler(data.train, world_size, rank, seed=options.seed)
    batches = BatchSampler(sampler, options.batch_size, drop_last=False)
    loader = DataLoader(data.train, sampler=batches, batch_size=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        loss_sum, started_s = torch.zeros((), dtype=torch.float64, device=device), time.monotonic()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach() * len(labels)
        mean_loss = float(psengine.mean(loss_sum / len(sampler)))
        seconds = time.monotonic() - started_s
        accuracy = evaluate(network, data, context)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {mean_loss:.4f}, accuracy {accuracy:.2%}, {seconds:.1f} s", flush=True)
    if rank == 0:
        weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in network.state_dict().values())
        print(f"weights: sha256 {hashlib.sha256(weights).hexdigest()[:16]}")
    return 0


if __name__ == "__main__":
    exit_code = main()
    psengine.shutdown()
    sys.exit(exit_code)
