"""Small networks that rows have in common."""

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from ways_of_training.run import CLASSES, WIDTH, Batch, Run


def mlp(*hidden: int, inputs: int = WIDTH, outputs: int = CLASSES) -> nn.Sequential:
    """Linear layers with tanh between."""
    layers: list[nn.Module] = []
    for width, following in itertools.pairwise((inputs, *(hidden or (8, 8)), outputs)):
        layers += [nn.Linear(width, following), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Pieces(nn.Module):
    """A body, a head, and a second head that a forward may leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.spare = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, with_spare: bool = False) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return self.head(hidden) + self.spare(hidden) if with_spare else self.head(hidden)


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of a batch."""
    return F.cross_entropy(model(x), y)


def train(
    run: Run,
    model: Any,
    steps: int = 3,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    batches: Iterable[Batch] | None = None,
) -> None:
    """Some steps, by default of SGD."""
    for x, y in run.training(run.sgd(model) if optimizer is None else optimizer, steps, batches=batches):
        loss = classify(model, x, y)
        loss.backward()
        run.note(loss)
