"""Train with native DDP's bits, whoever dies. docs/recipes/elastic.md

psengine run --workers 2 --independent --strategy sync:virtual_workers=4 examples/recipes/elastic.py [--fail-at 30]
torchrun --nproc-per-node=4 examples/recipes/elastic.py --native
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import psengine

VIRTUAL_WORKERS = 4


class Noisy(TensorDataset):
    """Digits with random noise, as an augmentation that draws numbers wherever a sample is loaded."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        image, digit = super().__getitem__(index)
        return image + 0.1 * torch.randn(image.shape), digit


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 64), nn.Linear(64, 10)
    )


@torch.no_grad()
def accuracy(network: nn.Module, images: torch.Tensor, digits: torch.Tensor) -> float:
    network.eval()
    correct = (network(images).argmax(1) == digits).float().mean().item()
    network.train()
    return correct


def main(arguments: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser()
    parser.add_argument("--native", action="store_true", help="native DDP, with as many ranks as virtual workers")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--fail-at", type=int, default=0, help="a step in which worker 1 kills itself, once")
    parser.add_argument("--hold", type=Path, help="a file that worker 1 makes when it dies and removes when it is back")
    parser.add_argument("--checkpoints", type=Path, help="a directory for a checkpoint every 20 steps")
    options = parser.parse_args(arguments)

    psengine.init()
    say = psengine.print if options.native else print  # native DDP's other ranks have running statistics of their own
    network = make_network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    if options.native:
        model = nn.parallel.DistributedDataParallel(network)
    else:
        model = psengine.DistributedDataParallel(network, strategy=f"sync:virtual_workers={VIRTUAL_WORKERS}")
        optimizer = psengine.DistributedOptimizer(optimizer, model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=400)
    if not options.native:
        model.register_state("scheduler", scheduler)
        if options.checkpoints:
            model.checkpoint_every(20, options.checkpoints)

    images, digits = load_digits(return_X_y=True)
    images, digits = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(digits)
    loader = psengine.ElasticLoader(Noisy(images[:1500], digits[:1500]), batch_size=8, seed=1, num_workers=1)
    worker = os.environ.get("PSENGINE_WORKER")
    if options.hold and worker == "1":
        options.hold.unlink(missing_ok=True)  # its second process: the others may go on
    steps: list[int] = []  # in which this process trained
    for epoch in loader.epochs(options.epochs):
        for step in loader.steps(epoch):
            if step.number == options.fail_at and 1 in steps and worker == "1":
                if options.hold:
                    options.hold.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            # Enough steps are left to train with it, however long its process takes to start.
            while options.hold and options.hold.exists() and step.number >= options.fail_at + 60:
                time.sleep(0.01)
            optimizer.zero_grad()
            for x, y in step.batches:
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                step.record(loss)
                steps.append(step.number)
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        say(f"epoch {epoch}: loss {step.mean():.4f}, accuracy {accuracy(network, images[1500:], digits[1500:]):.2%}")
    if not options.native:
        say(f"worker {worker}: process {os.getpid()} trained in steps {steps[0]} to {steps[-1]}")
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in network.state_dict().values())).hexdigest()
    say(f"weights sha256 {digest}")
    return digest


if __name__ == "__main__":
    main(sys.argv[1:])
    psengine.shutdown()
