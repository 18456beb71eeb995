"""Buffers: running statistics, counters, masks."""

import torch
from torch import Tensor, nn
from ways_of_training.networks import classify, mlp, train
from ways_of_training.run import CLASSES, WIDTH, Run
from ways_of_training.table import apart_from, row

# Rank 1's are its own after its last forward under native DDP, and rank 0's under sync-server (docs/design.md).
LATER = apart_from("buffer", reason="they are rank 0's at the end of backward, not before the next forward")


def normed(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8), layer, nn.Tanh(), nn.Linear(8, CLASSES))


@row(sync_server=LATER)
def batch_norm_evaluated(run: Run) -> None:
    """BatchNorm1d, evaluated between two steps through the wrapper."""
    model = run.wrap(normed(nn.BatchNorm1d(8)))
    optimizer = run.sgd(model)
    for x, y in run.batches(3):
        optimizer.zero_grad()
        classify(model, x, y).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            value = classify(model, x, y)
        if run.rank == 0:
            run.note(value)
        model.train()


class Counting(nn.Module):
    """Counts its forwards in an integer buffer, keeps a moving mean in one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.network = mlp()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.mean = self.mean.lerp(x.detach().mean(0), 0.1)
        return self.network(x - self.mean) * (1 + 0.1 * self.mask)


@row(sync_server=LATER)
def buffers_of_several_dtypes(run: Run) -> None:
    """An integer counter, a boolean mask, and a mean that forward replaces by a new tensor."""
    train(run, run.wrap(Counting()))


@row(sync_server=LATER)
def buffer_registered_late(run: Run) -> None:
    """A buffer is registered after two steps."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.network(x) * getattr(self, "scale", 1.0)

    model = run.wrap(Scaled())
    for step, (x, y) in enumerate(run.training(run.sgd(model), 4)):
        if step == 2:
            model.module.register_buffer("scale", torch.tensor(0.5 + run.rank))
        classify(model, x, y).backward()


@row(sync_server=LATER)
def buffers_and_no_sync(run: Run) -> None:
    """BatchNorm1d while accumulating inside no_sync."""
    model = run.wrap(normed(nn.BatchNorm1d(8)))
    for x, y in run.training(run.sgd(model), 3, size=8):
        with model.no_sync():
            classify(model, x[:4], y[:4]).backward()
        classify(model, x[4:], y[4:]).backward()
