"""What forward takes and returns, beside a tensor."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from ways_of_training.networks import Pieces
from ways_of_training.run import Run
from ways_of_training.table import row


@dataclass
class Scores:
    """What a forward may return."""

    scores: Tensor
    hidden: Tensor | None = None


def train(run: Run, pack: Callable[[Tensor, Tensor], Any], unpack: Callable[[Any], Tensor], **options: Any) -> None:
    class Packing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pieces = Pieces()

        def forward(self, x: Tensor, *, extra: dict[str, Tensor] | None = None) -> Any:
            hidden = torch.tanh(self.pieces.body(x))
            scores = self.pieces.head(hidden)
            if extra is not None:
                scores = scores + self.pieces.spare(hidden) * extra["factor"]
            return pack(scores, hidden)

    model = run.wrap(Packing(), **options)
    for step, (x, y) in enumerate(run.training(run.sgd(model), 4)):
        extra = {"factor": torch.tensor(0.5)} if step % 2 or "find_unused_parameters" not in options else None
        loss = F.cross_entropy(unpack(model(x, extra=extra)), y)
        loss.backward()
        run.note(loss)


@row
def output_in_a_dataclass(run: Run) -> None:
    """A dataclass, with find_unused_parameters."""
    train(run, lambda s, h: Scores(s), lambda o: o.scores, find_unused_parameters=True)


@row
def output_in_an_object(run: Run) -> None:
    """An object that nobody can look into."""

    class Opaque:
        def __init__(self, scores: Tensor) -> None:
            self.scores = scores

    train(run, lambda s, h: Opaque(s), lambda o: o.scores)
