"""What the storm trains: a GPT of about a million parameters on the source of Python's standard library.

It has whatever makes bits depend on who computes them, if somebody forgets it: dropout, samples that are changed at
random, AdamW, clipping, a scheduler, and an epoch whose last step is not full. What a process does is appended to a
file of its own, a line at a time, so that a kill loses nothing.

Native DDP, the oracle: psengine run --workers 8 training.py OUT --native
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import time
from pathlib import Path

import torch
from task import Model, Text, sha256_of
from torch import nn
from torch.nn import functional as F

import psengine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("out", type=Path, help="directory of the files of events")
    add("--samples", type=int, required=True)
    add("--batch", type=int, required=True, help="samples of a virtual worker")
    add("--epochs", type=int, required=True)
    add("--native", action="store_true", help="torch's DistributedDataParallel")
    add("--host", default="", help="where it runs; the storm finds processes by it")
    add("--checkpoints", type=Path)
    add("--every", type=int, default=50, help="steps between checkpoints")
    options = parser.parse_args()
    path = options.out / f"{options.host}-{os.getpid()}-{time.monotonic_ns()}.events"
    with path.open("w", buffering=1) as file, path.with_suffix(".stacks").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)  # asked for where a storm does not end

        def note(*event: object) -> None:
            file.write(json.dumps([time.monotonic(), *event]) + "\n")

        note("begin")
        torch.set_num_threads(1)
        with psengine.init():
            train(options, note)


def train(options: argparse.Namespace, note) -> None:
    torch.manual_seed(0)
    network = Model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    if options.native:
        model = nn.parallel.DistributedDataParallel(network)
    else:
        model = psengine.DistributedDataParallel(network)
        optimizer = psengine.DistributedOptimizer(optimizer, model)
        model.register_state("scheduler", scheduler)
        if options.checkpoints is not None:
            model.checkpoint_every(options.every, options.checkpoints)
    loader = psengine.ElasticLoader(Text(options.samples), batch_size=options.batch, seed=0)
    note("ready")
    for epoch in loader.epochs(options.epochs):
        for step in loader.steps(epoch):
            optimizer.zero_grad()
            for indices, text, targets in step.batches:
                loss = F.cross_entropy(model(text), targets.flatten())
                loss.backward()
                step.record(loss.detach())
                note("batch", step.number, indices.tolist())
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            note("step", step.number, step.mean())
            if (options.out / "stop").exists():
                os._exit(0)
    note("end", sha256_of(network))


if __name__ == "__main__":
    main()
