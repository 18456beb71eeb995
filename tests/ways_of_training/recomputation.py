"""Activation checkpointing in all modes."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from ways_of_training.networks import mlp, train
from ways_of_training.run import CLASSES, WIDTH, Run
from ways_of_training.table import refused, row

READY_TWICE = "mark a variable ready only once"


class Blocks(nn.Module):
    """Two blocks that are recomputed, with dropout in them; ``calls`` says in which order they are called."""

    def __init__(self, *calls: int, reentrant: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.calls, self.reentrant = calls or (0, 1), reentrant
        self.inlet, self.outlet = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inlet(x))
        for index in self.calls:
            x = x + checkpoint(self.blocks[index], x, use_reentrant=self.reentrant)
        return self.outlet(x)


@row
def blocks_without_reentry(run: Run) -> None:
    """Blocks recomputed, non-reentrant, with dropout whose random state is kept."""
    train(run, run.wrap(Blocks(reentrant=False, dropout=0.3)))


@row
def blocks_with_reentry(run: Run) -> None:
    """Blocks recomputed, reentrant, with dropout whose random state is kept."""
    train(run, run.wrap(Blocks(reentrant=True, dropout=0.3)))


@row(native=refused(READY_TWICE), everywhere=refused(READY_TWICE))
def block_used_twice_with_reentry(run: Run) -> None:
    """A recomputed block that is used twice, reentrant."""
    train(run, run.wrap(Blocks(0, 1, 1, reentrant=True)))


@row
def block_used_twice_in_a_static_graph(run: Run) -> None:
    """A recomputed block that is used twice, reentrant, with static_graph."""
    train(run, run.wrap(Blocks(0, 1, 1, reentrant=True), static_graph=True))


@row
def wrapper_recomputed(run: Run) -> None:
    """The wrapped model itself recomputed, non-reentrant: its forward is interrupted as soon as it may be."""
    model = run.wrap(mlp(8, 8))
    for x, y in run.training(run.sgd(model), 4):
        F.cross_entropy(checkpoint(model, x, use_reentrant=False), y).backward()
