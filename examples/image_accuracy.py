"""The accuracy on the test images, which the ranks share out."""

from __future__ import annotations

import torch
from image_data import Data
from torch import nn

import psengine


@torch.no_grad()
def evaluate(network: nn.Module, data: Data, context: psengine.Context) -> float:
    """The accuracy; each rank counts a part of the test images, every image once."""
    images, labels = (tensor[context.rank :: context.world_size].to(context.device) for tensor in data.test.tensors)
    correct = sum(
        int((network(i).argmax(1) == t).sum()) for i, t in zip(images.split(1000), labels.split(1000), strict=True)
    )
    return float(psengine.mean(correct / max(1, len(labels)), weight=len(labels)))
