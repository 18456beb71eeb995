"""The first MNIST example on several hosts: a perceptron (784-256-10), batches of 64 for each rank, SGD with rate 0.01.

On both hosts, where node-0 is one of them:
torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node-0:29400 examples/train_mlp.py [--native]
psengine run --nnodes 2 --workers 1 --rdzv-endpoint node-0:29400 examples/train_mlp.py

One process with the same steps, of which each takes the batches of both ranks:
python examples/train_mlp.py --batch-size 128

The images are Fashion-MNIST's, which stand for MNIST's: as many, as large, of as many classes. Debian's package
dataset-fashion-mnist brings them; without it, scikit-learn's digits of 8x8 pixels are used.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import psengine

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package


def load_images(directory: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Flat images and labels, to train with and to test with."""
    if directory is None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images, labels = torch.from_numpy(digits.images).float().flatten(1) / 16, torch.from_numpy(digits.target)
        return TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])

    def read(name: str, header_bytes: int) -> torch.Tensor:
        content = gzip.decompress((directory / name).read_bytes())
        return torch.frombuffer(bytearray(content[header_bytes:]), dtype=torch.uint8)

    splits = []
    for split in ("train", "t10k"):
        labels = read(f"{split}-labels-idx1-ubyte.gz", 8).long()
        images = read(f"{split}-images-idx3-ubyte.gz", 16).view(len(labels), -1).float() / 255
        splits.append(TensorDataset(images, labels))
    return splits[0], splits[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--native", action="store_true", help="wrap by torch.nn.parallel.DistributedDataParallel")
    add("--data", type=Path, metavar="DIR", help=f"MNIST-like images, gzipped IDX files (default: {FASHION_MNIST})")
    add("--batch-size", type=int, default=64, metavar="N", help="images of each rank's step (default: 64)")
    add("--epochs", type=int, default=5, metavar="N", help="default: 5")
    add("--learning-rate", type=float, default=0.01, metavar="X", help="default: 0.01")
    options = parser.parse_args()
    if options.data is None and FASHION_MNIST.is_dir():
        options.data = FASHION_MNIST
    with psengine.init() as context:
        train(options, context)


def train(options: argparse.Namespace, context: psengine.Context) -> None:
    print(f"rank {context.rank} of {context.world_size} on {context.hostname}", flush=True)
    train_data, test_data = load_images(options.data)
    psengine.print(f"{len(train_data)} images from {options.data or 'scikit-learn (digits)'}")
    torch.manual_seed(0)
    pixels, classes = train_data.tensors[0].shape[1], int(train_data.tensors[1].max()) + 1
    network = nn.Sequential(nn.Linear(pixels, 256), nn.ReLU(), nn.Linear(256, classes)).to(context.device)
    wrap = nn.parallel.DistributedDataParallel if options.native else psengine.DistributedDataParallel
    model = wrap(network)
    sampler = DistributedSampler(train_data, context.world_size, context.rank)
    batches = BatchSampler(sampler, options.batch_size, drop_last=False)
    loader = DataLoader(train_data, sampler=batches, batch_size=None)  # fetches a batch at once
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate)
    for epoch in range(1, options.epochs + 1):
        sampler.set_epoch(epoch)
        total, started_s = torch.zeros((), dtype=torch.float64, device=context.device), time.monotonic()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(context.device)), labels.to(context.device))
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(labels)
        mean_loss = float(psengine.mean(total / len(sampler)))
        seconds = time.monotonic() - started_s
        with torch.no_grad():
            images, labels = (tensor[context.rank :: context.world_size] for tensor in test_data.tensors)
            correct = int((network(images.to(context.device)).argmax(1) == labels.to(context.device)).sum())
        accuracy = psengine.sum(correct) / len(test_data)
        psengine.print(f"epoch {epoch}: loss {mean_loss:.4f}, accuracy {accuracy:.2%}, {seconds:.1f} s")
    weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in network.state_dict().values())
    psengine.print(f"weights: sha256 {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
