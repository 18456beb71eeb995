"""A training that tests start with srun, mpirun, torchrun and psengine run: every worker's losses, to the bit.

scheduled_training.py FOLDER [--steps N] [--pause SECONDS] [--slow WORKER] [--hold HOLD] [--checkpoint]

A worker appends a line to FOLDER/workerN.jsonl for each step. FOLDER/begins-N-PID is there before it wraps its model,
FOLDER/wrapped-N-PID after that. ``--slow``: this worker alone pauses. ``--checkpoint``:
rank 0 saves each step, and a later run goes on from there.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import psengine
from support.holding import held


def model_of() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    # The servers keep buffers: under async a worker reads how far the job is from here.
    model.register_buffer("steps", torch.zeros(()))
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)


def batch(worker: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    return torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, worker: int, step: int) -> float:
    values, labels = batch(worker, step)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(values), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def native_losses(rank: int, world_size: int, steps: int) -> list[str]:
    """In a rank: its losses under native DDP."""
    model = model_of()
    optimizer = optimizer_of(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    return [train_step(wrapped, optimizer, rank, step).hex() for step in range(steps)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--slow", type=int)
    parser.add_argument("--hold", default="")
    parser.add_argument("--checkpoint", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    context = psengine.init()
    module = model_of()
    (options.folder / f"begins-{context.worker}-{os.getpid()}").touch()
    model = psengine.DistributedDataParallel(module)
    optimizer = psengine.DistributedOptimizer(optimizer_of(module), model)
    (options.folder / f"wrapped-{context.worker}-{os.getpid()}").touch()
    saved, first = options.folder / "checkpoint.pt", int(module.steps.item())
    if options.checkpoint and saved.exists():
        state = torch.load(saved)
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    with open(options.folder / f"worker{context.worker}.jsonl", "a") as out:
        for step in range(first, options.steps):
            held(step, options.hold)
            loss = train_step(model, optimizer, context.worker, step)
            module.steps.fill_(step + 1)
            line = {"step": step, "loss": loss.hex(), "host": context.hostname, "pid": os.getpid()}
            out.write(json.dumps({**line, "workers": context.workers}) + "\n")
            out.flush()
            if options.checkpoint:
                dist.barrier()  # all have told of this step before it is in the checkpoint
            if options.checkpoint and context.is_main_process:
                temporary = saved.with_suffix(".new")
                torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, temporary)
                temporary.replace(saved)
            time.sleep(options.pause if options.slow in (None, context.worker) else 0.002)
    psengine.shutdown()


if __name__ == "__main__":
    main()
