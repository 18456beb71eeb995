"""A training with virtual workers, for ``psengine run`` to start; prints each step, and the digest of its weights.

Argument: the seconds that a batch takes. Variables: a directory for checkpoints, other workers' seed.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import psengine
from support.holding import held

if TYPE_CHECKING:
    from support.command_process import RunningCommand


def process_of(command: RunningCommand, worker: int, step: int) -> int:
    """The process of a worker, once it has done a step, or a later one."""

    def found() -> int:
        lines = re.findall(rf"process (\d+) worker {worker} step (\d+)", command.stdout)
        return next((int(process) for process, done in reversed(lines) if int(done) >= step), 0)

    return command.wait_until(found)


def await_another(command: RunningCommand, worker: int, former: int) -> None:
    """Wait until another process than ``former`` is this worker's, and about to join."""
    ready = rf"process (\d+) worker {worker} is ready"
    command.wait_until(lambda: set(re.findall(ready, command.stdout)) - {str(former)})


def weights_in(stdout: str) -> set[str]:
    """The digests of the weights with which workers ended."""
    return set(re.findall(r"weights (\w+)", stdout))


def main() -> None:
    batch_s = float(sys.argv[1])
    features = torch.randn(320, 8, generator=torch.Generator().manual_seed(1))
    with psengine.init() as context:
        torch.manual_seed(context.worker)  # a newcomer's own values count for nothing
        network = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 3))
        if not context.worker:
            torch.manual_seed(0)
            for parameter in network.parameters():
                nn.init.normal_(parameter)
        strategy = "sync:virtual_workers=4"
        model = psengine.DistributedDataParallel(network, strategy=strategy, bucket_cap_mb_list=[0.0002])
        optimizer = psengine.DistributedOptimizer(torch.optim.AdamW(network.parameters()), model)
        dataset = TensorDataset(features, features.sum(1).gt(0).long())
        if directory := os.environ.get("TEST_CHECKPOINTS"):
            model.checkpoint_every(2, directory)
        seed = int(os.environ.get("TEST_SEED", "3")) if context.worker else 3
        loader = psengine.ElasticLoader(dataset, batch_size=2, seed=seed)
        print(f"process {os.getpid()} worker {context.worker} is ready", flush=True)
        for epoch in loader.epochs(2):
            for step in loader.steps(epoch):
                held(step.number)
                optimizer.zero_grad()
                for x, y in step.batches:
                    time.sleep(batch_s)
                    F.cross_entropy(model(x), y).backward()
                optimizer.step()
                print(f"process {os.getpid()} worker {context.worker} step {step.number}", flush=True)
        values = b"".join(parameter.detach().numpy().tobytes() for parameter in network.parameters())
    print("weights", hashlib.sha256(values).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
