"""The four models whose step is measured, each with a batch that makes it last tens of milliseconds on one core."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Workload(NamedTuple):
    """What makes a model, of torch's generator, and what makes one batch for it: inputs and targets."""

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]


class ManySmall(nn.Sequential):
    """Linear layers of 16 x 16, two parameters each: next to no arithmetic, so what is left is a parameter's cost."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(16, 16) for _ in range(200)))


class MultilayerPerceptron(nn.Sequential):
    """Few large matrices: the exchange is bound by bandwidth."""

    def __init__(self) -> None:
        widths = [1024, 1536, 1536, 1536, 1536, 1000]
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        super().__init__(*layers[:-1])


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.second_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(self.first_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


class GPT(nn.Module):
    """Causal language model: 4 blocks of width 384, 6 heads, vocabulary 4096, tied embeddings."""

    def __init__(self, vocabulary: int = 4096, width: int = 384, blocks: int = 4, context: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(1, context, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, 6) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(text) + self.positions))).flatten(0, 1)


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = (
            nn.Identity()
            if inputs == outputs
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.second_norm(self.second(F.relu(self.first_norm(self.first(x)))))
        return F.relu(y + self.shortcut(x))


class ResidualNet(nn.Sequential):
    """A residual network (He et al. 2016); ``counts`` are the blocks of each of its four stages."""

    def __init__(self, counts: Sequence[int], classes: int) -> None:
        layers: list[nn.Module] = [
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        inputs = 64
        for stage, count in enumerate(counts):
            width = 64 << stage
            for place in range(count):
                layers.append(ResidualBlock(inputs, width, 2 if stage and not place else 1))
                inputs = width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def _vectors(rows: int, width: int, classes: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(rows, width), torch.randint(classes, (rows,)))


def _text(rows: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(vocabulary, (rows, length + 1))
    return text[:, :-1].contiguous(), text[:, 1:].flatten()


WORKLOADS = {
    "small": Workload(ManySmall, _vectors(8, 16, 16)),
    "mlp": Workload(MultilayerPerceptron, _vectors(64, 1024, 1000)),
    "gpt": Workload(GPT, lambda: _text(1, 64, 4096)),
    "cnn": Workload(
        lambda: ResidualNet((2, 2, 2, 2), classes=100),
        lambda: (torch.randn(4, 3, 64, 64), torch.randint(100, (4,))),
    ),
}
