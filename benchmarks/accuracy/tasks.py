"""What is learnt: Fashion-MNIST, and the source of Python's standard library, by perceptrons that learn in seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from harness.data import fashion_mnist, library_text, normalized, pieces
from torch import nn
from torch.nn import functional as F

CONTEXT_LENGTH, WIDTH, BYTES = 16, 16, 256
TEXT_BYTES = 4 << 20
VALIDATION_PIECES = 8192
Samples = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Task:
    """Data in memory, and a model for them.

    Attributes:
        measure: what ``judge`` measures besides the loss.
        model: makes a new one, of torch's generator.
        batch: draws so many samples of the training data, with replacement.
        test: samples that are not trained on.
    """

    measure: str
    model: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Samples]
    test: Samples

    def loss(self, model: nn.Module, batch_size: int, generator: torch.Generator) -> torch.Tensor:
        inputs, targets = self.batch(batch_size, generator)
        return F.cross_entropy(model(inputs), targets)

    @torch.no_grad()
    def judge(self, model: nn.Module) -> tuple[float, float]:
        """Loss in nats, and percent of wrong answers, on the test samples."""
        scores = model(self.test[0])
        wrong = (scores.argmax(dim=1) != self.test[1]).float().mean()
        return F.cross_entropy(scores, self.test[1]).item(), 100 * wrong.item()


def _images() -> Task:
    """Fashion-MNIST, 784-128-10: 102 thousand parameters."""
    images, labels = fashion_mnist("train")
    test_images, test_labels = fashion_mnist("t10k")

    def batch(size: int, generator: torch.Generator) -> Samples:
        picked = torch.randint(len(labels), (size,), generator=generator)
        return normalized(images[picked]), labels[picked]

    return Task(
        measure="test error, %",
        model=lambda: nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)),
        batch=batch,
        test=(normalized(test_images), test_labels),
    )


def _text() -> Task:
    """The next byte from the 16 before it: 70 thousand parameters.

    The network of Bengio et al. 2003, "A Neural Probabilistic Language Model", without its direct connections.
    """
    train, validation = library_text(TEXT_BYTES)
    return Task(
        measure="wrong next bytes, %",
        model=lambda: nn.Sequential(
            nn.Embedding(BYTES, WIDTH),
            nn.Flatten(),
            nn.Linear(CONTEXT_LENGTH * WIDTH, 128),
            nn.Tanh(),
            nn.Linear(128, BYTES),
        ),
        batch=lambda size, generator: pieces(train, size, CONTEXT_LENGTH, generator),
        test=pieces(validation, VALIDATION_PIECES, CONTEXT_LENGTH, torch.Generator().manual_seed(0)),
    )


TASKS: dict[str, Callable[[], Task]] = {"images": _images, "text": _text}


@cache
def task_of(name: str) -> Task:
    """Its data are read once."""
    return TASKS[name]()
