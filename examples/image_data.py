"""The images: MNIST or Fashion-MNIST from IDX files, or scikit-learn's digits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from idx_images import IdxError, read_split
from image_network import SMALLEST_IMAGE
from rank_errors import UserError
from torch.utils.data import TensorDataset

from psengine.environment.installation import install_command


@dataclass
class Data:
    """Images, uint8 of shape (count, 1, rows, columns), with labels, int64 of shape (count,)."""

    train: TensorDataset
    test: TensorDataset
    classes: int


def load_data(directory: Path | None) -> Data:
    """Return the MNIST-like images of ``directory``; without one, scikit-learn's digits, of which a fifth are tests."""
    if directory is not None:
        try:
            splits = [read_split(directory, "train"), read_split(directory, "test")]
        except IdxError as error:
            raise UserError(f"--data {error}") from error
    else:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise UserError(f"the digits need scikit-learn: {install_command('examples')}, or give --data") from error
        digits = load_digits()
        images = (torch.from_numpy(digits.images) * (255 / 16)).to(torch.uint8)  # they count from 0 to 16
        labels = torch.from_numpy(digits.target)
        is_test = torch.arange(len(labels)) % 5 == 0
        splits = [(images[~is_test], labels[~is_test]), (images[is_test], labels[is_test])]

    for images, _ in splits:
        if min(images.shape[1:]) < SMALLEST_IMAGE:
            raise UserError(
                f"--data {directory}: the network needs images of at least {SMALLEST_IMAGE}x{SMALLEST_IMAGE}, got"
                f" {images.shape[1]}x{images.shape[2]}"
            )
    train, test = (TensorDataset(images.unsqueeze(1), labels.long()) for images, labels in splits)
    return Data(train, test, classes=1 + max(int(labels.max()) for _, labels in splits))


def swapped_halves(data: Data) -> list[Data]:
    """All images, training and test images together, in two halves: train on one, test on the other, and vice versa."""
    columns = zip(data.train.tensors, data.test.tensors, strict=True)
    images, labels = (torch.cat([train, test]) for train, test in columns)
    halves = [TensorDataset(images[start::2], labels[start::2]) for start in (0, 1)]
    return [Data(halves[0], halves[1], data.classes), Data(halves[1], halves[0], data.classes)]
