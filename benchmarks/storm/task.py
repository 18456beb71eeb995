"""What is learnt: a GPT of a million parameters, and the source of Python's standard library. Needs no psengine."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.data import library_text
from step_overhead.models import GPT

LENGTH, WIDTH, BLOCKS, MOST_SHIFT = 32, 144, 4, 7
TEXT_BYTES = 4_000_000


class Text(Dataset):
    """Pieces of text, each with its number; where a piece begins is random by a few bytes."""

    def __init__(self, count: int) -> None:
        self.text, _ = library_text(TEXT_BYTES)
        self.starts = torch.linspace(0, len(self.text) - LENGTH - MOST_SHIFT - 2, count).long()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        start = self.starts[index] + torch.randint(MOST_SHIFT + 1, ())
        piece = self.text[start : start + LENGTH + 1].long()
        return index, piece[:-1], piece[1:]


class Model(GPT):
    """With dropout."""

    def __init__(self) -> None:
        super().__init__(256, WIDTH, BLOCKS, LENGTH)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        embedded = F.dropout(self.tokens(text) + self.positions, 0.1, self.training)
        return self.head(self.norm(self.blocks(embedded))).flatten(0, 1)


def sha256_of(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
