"""The networks that the examples train."""

from __future__ import annotations

import torch
from torch import nn

SMALLEST_IMAGE = 8  # rows and columns; the network halves them twice


class ImageClassifier(nn.Module):
    """Three convolutions with BatchNorm, the mean over all places, and a linear head.

    Takes uint8 images of any size from 8x8, shape (batch, 1, rows, columns); gives scores, shape (batch, classes).
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        )
        self.head = nn.Linear(64, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images / 255).mean(dim=(2, 3)))


class ImagePerceptron(nn.Sequential):
    """One hidden layer: 784-256-10 for MNIST's images of 28x28 pixels, as in PyTorch's first MNIST examples.

    Takes uint8 images, shape (batch, 1, rows, columns) of ``pixels`` in all; gives scores, shape (batch, classes).
    """

    def __init__(self, pixels: int, classes: int, hidden: int = 256) -> None:
        super().__init__(nn.Flatten(), nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images / 255)
