"""Train a small convolutional network on images, on one process or many, under any strategy.

python examples/train_images.py                                             one process
psengine run --workers 2 examples/train_images.py                           two, averaging gradients
psengine run --workers 2 examples/train_images.py --native                  native DistributedDataParallel: same losses
psengine run --workers 2 --strategy async examples/train_images.py          gradients go to a server
psengine run --workers 2 examples/train_images.py --checkpoint digits.pt    saves each epoch; goes on where it ended
python examples/train_images.py --checkpoint digits.pt --evaluate           its accuracy

The images are scikit-learn's digits, or MNIST-like images of IDX files: --data DIR.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import struct
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import psengine


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="MNIST-like images as IDX files (default: scikit-learn's digits)")
    add("--strategy", metavar="NAME", help="default: PSENGINE_STRATEGY, else sync")
    add("--native", action="store_true", help="native DistributedDataParallel in the place of psengine's")
    add("--epochs", type=int, default=5, metavar="N", help="default: 5")
    add("--batch-size", type=int, default=32, metavar="N", help="images of each worker's step (default: 32)")
    add("--learning-rate", type=float, default=0.1, metavar="X", help="default: 0.1")
    add("--momentum", type=float, default=0.9, metavar="X", help="default: 0.9")
    add("--checkpoint", type=Path, metavar="PATH", help="write it after each epoch; go on from it if it is there")
    add("--evaluate", action="store_true", help="only evaluate the checkpoint")
    add("--seed", type=int, default=0, metavar="N", help="of the first weights and the order of images (default: 0)")
    options = parser.parse_args()
    if options.evaluate and options.checkpoint is None:
        parser.error("--evaluate needs --checkpoint PATH")
    return options


def main() -> None:
    options = parse_options()
    with psengine.init() as context:
        train_data, test_data = load_images(options.data)
        torch.manual_seed(options.seed)
        network = make_network(classes=int(train_data.tensors[1].max()) + 1).to(context.device)
        first_epoch, optimizer_state = 0, None
        if options.checkpoint is not None and options.checkpoint.exists():
            saved = torch.load(options.checkpoint, map_location="cpu", weights_only=True)
            network.load_state_dict(saved["network"])
            first_epoch, optimizer_state = saved["epoch"], saved["optimizer"]
        if options.evaluate:
            psengine.print(f"accuracy {evaluate(network, test_data, context):.2%} after epoch {first_epoch}")
            return
        model, optimizer = wrap(network, options)
        if optimizer_state is not None:
            optimizer.load_state_dict(optimizer_state)
        sampler = DistributedSampler(train_data, context.workers, context.worker, seed=options.seed)
        loader = DataLoader(train_data, options.batch_size, sampler=sampler)
        psengine.print(f"{len(train_data)} training and {len(test_data)} test images; {context.workers} workers")
        for epoch in range(first_epoch + 1, options.epochs + 1):
            sampler.set_epoch(epoch)  # another order in each epoch
            loss = train(model, optimizer, loader, context)
            psengine.stop_if_not_finite(loss)
            accuracy = evaluate(model.module, test_data, context)
            psengine.print(f"epoch {epoch}/{options.epochs}  loss {loss:.4f}  accuracy {accuracy:.2%}")
            if options.checkpoint is not None:
                save(options.checkpoint, network, optimizer, epoch)


def wrap(
    network: nn.Module, options: argparse.Namespace
) -> tuple[nn.parallel.DistributedDataParallel, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(network.parameters(), lr=options.learning_rate, momentum=options.momentum)
    if options.native:
        return nn.parallel.DistributedDataParallel(network), optimizer
    model = psengine.DistributedDataParallel(network, strategy=options.strategy)
    return model, psengine.DistributedOptimizer(optimizer, model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, context: psengine.Context) -> float:
    """One epoch; return the mean loss over all samples of the ranks of this group."""
    model.train()
    total = torch.zeros((), dtype=torch.float64, device=context.device)
    count = 0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(context.device)), labels.to(context.device))
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(labels)
        count += len(labels)
    return float(psengine.mean(total.item() / count, weight=count))


@torch.no_grad()
def evaluate(network: nn.Module, data: TensorDataset, context: psengine.Context) -> float:
    """The accuracy of rank 0's network; every image counts once. Ranks' running statistics, or weights, may differ."""
    network = copy.deepcopy(network).eval()
    for tensor in network.state_dict().values():
        dist.broadcast(tensor, src=0)
    correct = count = 0
    for images, labels in DataLoader(data, 1000, sampler=psengine.EvaluationSampler(data)):
        correct += int((network(images.to(context.device)).argmax(1) == labels.to(context.device)).sum())
        count += len(labels)
    totals = psengine.sum({"correct": correct, "count": count})
    return totals["correct"] / totals["count"]


def save(path: Path, network: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """All ranks call it, because servers or other ranks may have parts of the optimizer's state; one writes."""
    state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    if psengine.is_main_process():
        temporary = path.with_suffix(".part")
        torch.save(state, temporary)
        temporary.replace(path)  # whole or not at all
    psengine.barrier()


def make_network(classes: int) -> nn.Module:
    """For images of any size from 8 x 8, as floats of shape (batch, 1, rows, columns)."""
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((1, 16, 1), (16, 32, 2), (32, 64, 2)):
        convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def load_images(directory: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """To train with, and to test with: of the digits a fifth."""
    if directory is not None:
        return read_split(directory, "train"), read_split(directory, "t10k")
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = torch.from_numpy(digits.images).float().unsqueeze(1) / 16, torch.from_numpy(digits.target)
    is_test = torch.arange(len(labels)) % 5 == 4
    return TensorDataset(images[~is_test], labels[~is_test]), TensorDataset(images[is_test], labels[is_test])


def read_split(directory: Path, split: str) -> TensorDataset:
    images = read_idx(directory / f"{split}-images-idx3-ubyte.gz").float().unsqueeze(1) / 255
    return TensorDataset(images, read_idx(directory / f"{split}-labels-idx1-ubyte.gz").long())


def read_idx(path: Path) -> torch.Tensor:
    """The unsigned bytes of an IDX file: zero, zero, type 8, number of dimensions, the dimensions, the values."""
    with gzip.open(path) as file:
        dimensions = file.read(4)[3]
        shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
        return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).reshape(shape)


if __name__ == "__main__":
    main()
