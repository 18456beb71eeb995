"""The built-in models of ``psengine verify``: each is a target that asks something else of data-parallel training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS = 8


@dataclass(frozen=True, kw_only=True)
class ZooModel:
    """A built-in target.

    Attributes:
        asks: what it asks of data-parallel training, for the table.
        build: the target function.
    """

    asks: str
    build: Callable[[], tuple[Any, ...]]


def _vectors(width: int, classes: int) -> Callable[[int, int, int], tuple[Tensor, Tensor]]:
    """Random rows and labels that depend on step and rank alone."""

    def batch(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return torch.randn(ROWS, width, generator=generator), torch.randint(classes, (ROWS,), generator=generator)

    return batch


def _images(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(ROWS, 3, 8, 8, generator=generator), torch.randint(4, (ROWS,), generator=generator)


def _text(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    text = torch.randint(32, (ROWS, 9), generator=generator)
    return text[:, :-1], text[:, 1:]


def _cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    output = model(inputs)
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def _momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _mlp() -> tuple[Any, ...]:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    return model, _vectors(16, 4), _cross_entropy, _momentum


def _cnn() -> tuple[Any, ...]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.BatchNorm2d(16, momentum=None),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )
    return model, _images, _cross_entropy, _momentum


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 32)
        self.positions = nn.Parameter(torch.randn(8, 32) * 0.02)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 32)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(8))

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(text) + self.positions, mask=self.mask))  # type: ignore[no-any-return]


def _transformer() -> tuple[Any, ...]:
    # Not Adam: the attention's key bias has no effect, so its gradient is rounding alone; Adam would make steps of it.
    return _Transformer(), _text, _cross_entropy, _momentum


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 24)
        self.cells = nn.LSTM(24, 32, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(32, 32)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.cells(self.tokens(text))[0])  # type: ignore[no-any-return]


def _recurrent() -> tuple[Any, ...]:
    return _Recurrent(), _text, _cross_entropy, _adamw


class _Branching(nn.Module):
    """Two branches, of which a row takes one: ranks use different parameters, and one is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(16, 32)
        self.branches = nn.ModuleList(nn.Linear(32, 4) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        branch = int(inputs[0, 0] > 0)
        return self.branches[branch](self.trunk(inputs).relu())  # type: ignore[no-any-return]


def _branching() -> tuple[Any, ...]:
    return _Branching(), _vectors(16, 4), _cross_entropy, _momentum, {"find_unused_parameters": True}


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 24)
        self.middle = nn.Linear(24, 24)
        self.head = nn.Linear(24, 32, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.middle(self.tokens(text)).relu())  # type: ignore[no-any-return]


def _tied() -> tuple[Any, ...]:
    return _Tied(), _text, _cross_entropy, _adamw


class _SparseRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 16, sparse=True)
        self.head = nn.Linear(16, 32)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.tokens(text))  # type: ignore[no-any-return]


def _sparse() -> tuple[Any, ...]:
    return _SparseRows(), _text, _cross_entropy, lambda parameters: torch.optim.SGD(parameters, lr=0.1)


class _Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 32, dtype=torch.float64)
        self.third = nn.Linear(32, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.second(self.first(inputs).relu().double()).relu()
        return self.third(hidden.float())  # type: ignore[no-any-return]


def _mixed() -> tuple[Any, ...]:
    return _Mixed(), _vectors(16, 4), _cross_entropy, _momentum


def _frozen() -> tuple[Any, ...]:
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
    model[0].requires_grad_(False)
    options = {"gradient_as_bucket_view": True, "static_graph": True}
    return model, _vectors(16, 4), _cross_entropy, _adamw, options


def _accumulating() -> tuple[Any, ...]:
    def two_halves(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        half = ROWS // 2
        with model.no_sync():  # type: ignore[operator]
            (F.cross_entropy(model(inputs[:half]), targets[:half]) / 2).backward()
        return F.cross_entropy(model(inputs[half:]), targets[half:]) / 2

    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return model, _vectors(16, 4), two_halves, _momentum


ZOO = {
    "mlp": ZooModel(asks="dropout; momentum", build=_mlp),
    "cnn": ZooModel(asks="BatchNorm's running statistics", build=_cnn),
    "transformer": ZooModel(asks="attention with dropout", build=_transformer),
    "rnn": ZooModel(asks="LSTM with dropout; AdamW", build=_recurrent),
    "unused": ZooModel(asks="parameters that a rank, or all, leave unused", build=_branching),
    "tied": ZooModel(asks="one weight in two places; AdamW", build=_tied),
    "sparse": ZooModel(asks="sparse embedding gradients", build=_sparse),
    "mixed": ZooModel(asks="float32 and float64 parameters", build=_mixed),
    "frozen": ZooModel(asks="frozen layer, views, static graph", build=_frozen),
    "accumulation": ZooModel(asks="gradients accumulated under no_sync", build=_accumulating),
}
