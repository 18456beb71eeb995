"""What is learnt: Fashion-MNIST, and the source of Python's standard library, by perceptrons that learn in seconds."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from idx_images import read_split
from text_data import load_text, random_batch

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # where Debian's dataset-fashion-mnist puts it
PIXEL_MEAN, PIXEL_DEVIATION = 0.286, 0.353
CONTEXT_LENGTH = 16
BYTES = 256
TEXT_BYTES = 4 << 20
VALIDATION_PIECES = 8192


class Task(ABC):
    """Data in memory, and a model for them.

    Attributes:
        measure: what ``judge`` measures besides the loss.
    """

    name: str
    measure: str

    @abstractmethod
    def model(self) -> nn.Module:
        """A new one, of torch's generator."""

    @abstractmethod
    def loss(self, model: nn.Module, batch_size: int, generator: torch.Generator) -> torch.Tensor:
        """Of a batch that ``generator`` draws from all training data, with replacement."""

    @abstractmethod
    def judge(self, model: nn.Module) -> tuple[float, float]:
        """Loss in nats, and percent of wrong answers, on data that are not trained on."""


class Images(Task):
    """Fashion-MNIST, 784-128-10: 102 thousand parameters."""

    name = "images"
    measure = "test error, %"

    def __init__(self) -> None:
        (self._images, self._labels), test = (read_split(FASHION_MNIST, split) for split in ("train", "test"))
        self._labels = self._labels.long()
        self._test_images, self._test_labels = _normal(test[0]), test[1].long()

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))

    def loss(self, model: nn.Module, batch_size: int, generator: torch.Generator) -> torch.Tensor:
        picked = torch.randint(len(self._labels), (batch_size,), generator=generator)
        return F.cross_entropy(model(_normal(self._images[picked])), self._labels[picked])

    @torch.no_grad()
    def judge(self, model: nn.Module) -> tuple[float, float]:
        scores = model(self._test_images)
        return _judged(scores, self._test_labels)


class Text(Task):
    """The next byte of the standard library's source from the 16 before it: 70 thousand parameters.

    The network of Bengio et al. 2003, "A Neural Probabilistic Language Model", without its direct connections.
    """

    name = "text"
    measure = "wrong next bytes, %"

    def __init__(self) -> None:
        text = load_text(None, TEXT_BYTES)
        self._train = text.train
        generator = torch.Generator().manual_seed(0)
        self._validation = random_batch(text.validation, VALIDATION_PIECES, CONTEXT_LENGTH, generator)

    def model(self) -> nn.Module:
        width = 16
        return nn.Sequential(
            nn.Embedding(BYTES, width),
            nn.Flatten(),
            nn.Linear(CONTEXT_LENGTH * width, 128),
            nn.Tanh(),
            nn.Linear(128, BYTES),
        )

    def loss(self, model: nn.Module, batch_size: int, generator: torch.Generator) -> torch.Tensor:
        tokens, following = random_batch(self._train, batch_size, CONTEXT_LENGTH, generator)
        return F.cross_entropy(model(tokens), following[:, -1])

    @torch.no_grad()
    def judge(self, model: nn.Module) -> tuple[float, float]:
        tokens, following = self._validation
        return _judged(model(tokens), following[:, -1])


TASKS: dict[str, type[Task]] = {"images": Images, "text": Text}


@cache
def task_of(name: str) -> Task:
    """Its data are read once."""
    return TASKS[name]()


def _normal(images: torch.Tensor) -> torch.Tensor:
    return (images.flatten(1).float() / 255 - PIXEL_MEAN) / PIXEL_DEVIATION


def _judged(scores: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
    wrong = (scores.argmax(dim=1) != wanted).float().mean()
    return F.cross_entropy(scores, wanted).item(), 100 * wrong.item()
