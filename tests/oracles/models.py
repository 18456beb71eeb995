"""Small models, one for each thing that an exchange of values may get wrong, with a batch and the wrapper's options."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, CLASSES, WORDS = 8, 4, 32


class Model(NamedTuple):
    """``make()`` makes the module; ``inputs(generator)`` what it is called with, for ``ROWS`` rows."""

    make: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], tuple[Tensor, ...]]
    options: Mapping[str, Any] = {}

    def loss(self, module: nn.Module, step: int, rank: int) -> Tensor:
        """Of the batch of a step on a rank."""
        generator = torch.Generator().manual_seed(1_000_003 * (rank + 1) + step)
        labels = torch.randint(CLASSES, (ROWS,), generator=generator)
        return F.cross_entropy(module(*self.inputs(generator)), labels)


def vectors(width: int) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    return lambda generator: (torch.randn(ROWS, width, generator=generator),)


def images(generator: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randn(ROWS, 3, 8, 8, generator=generator),)


def words(generator: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randint(WORDS, (ROWS, 5), generator=generator),)


def routed(generator: torch.Generator) -> tuple[Tensor, ...]:
    """Rows, and the experts that this rank uses in this step."""
    return (*vectors(9)(generator), torch.rand(3, generator=generator) < 0.4)


class Chunks(nn.Module):
    """Servers cut its first matrix within a row, and the kernel of a convolution is not row-major in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Conv2d(3, 8, 2).to(memory_format=torch.channels_last)
        self.inner, self.outer = nn.Linear(8, 700), nn.Linear(700, 501)
        self.head = nn.Linear(501, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        patches = x.unflatten(1, (3, 2, 1)).expand(-1, -1, -1, 2)
        return self.head(torch.tanh(self.outer(torch.tanh(self.inner(self.kernel(patches).flatten(1))))))


class BatchNorm(nn.Module):
    """Gradients of four dimensions, float and integer buffers."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2))
        self.features = nn.Sequential(*layers, nn.BatchNorm2d(16, momentum=None), nn.ReLU())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


class Mixed(nn.Module):
    """float32, float64 and bfloat16 take turns, with scalars between them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(1))
        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.bfloat16, torch.float64)
        widths = itertools.pairwise((10, 12, 17, 12, 9, 12, CLASSES))
        self.layers = nn.ModuleList(nn.Linear(*w, dtype=dtype) for w, dtype in zip(widths, dtypes, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(torch.tanh(x * self.scale + self.shift).to(layer.weight.dtype))
        return x


class Experts(nn.Module):
    """Parameters that nobody uses, and that some ranks use in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.never, self.head = nn.Linear(9, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        for index in chosen.nonzero().flatten().tolist():
            hidden = hidden + torch.tanh(self.experts[index](hidden))
        return self.head(hidden)


class Sparse(nn.Module):
    """Sparse gradients between dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8, sparse=True)
        self.hidden = nn.Linear(16, 16)
        self.bag = nn.EmbeddingBag(WORDS, 8, sparse=True, mode="sum")
        self.head = nn.Linear(16, CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        both = torch.cat([self.words(text).mean(1), self.bag(text)], dim=1)
        return self.head(torch.tanh(self.hidden(both)))


class Shapes(nn.Module):
    """Beside dense float32 what else a bucket may hold: half, complex, no elements, gradients across the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.none, self.narrow = nn.Parameter(torch.ones(0)), nn.Parameter(torch.randn(900, dtype=torch.float16))
        self.turned = nn.Parameter(torch.randn(50, 20).t())
        self.spiral = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.head = nn.Linear(9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        shift = self.narrow.float().mean() + self.turned.expand(2, 20, 50).mean() + self.spiral.abs().sum()
        return self.head(x * shift + self.none.sum())


class Pieces(nn.Module):
    """Parameters that fill more than one piece of a bucket; with "int8" and three ranks the second's slices differ."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(100_000, 8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x @ self.rows.T @ self.rows * 1e-5)


MODELS = {
    "chunks": Model(Chunks, vectors(6)),
    "batch norm": Model(BatchNorm, images),
    "own buffers": Model(BatchNorm, images, {"forward_sync_buffers": False}),
    "mixed": Model(Mixed, vectors(10)),
    "unused": Model(Experts, routed, {"find_unused_parameters": True}),
    "sparse": Model(Sparse, words),
    "shapes": Model(Shapes, vectors(9), {"gradient_as_bucket_view": True, "static_graph": True}),
    "pieces": Model(Pieces, vectors(8)),
}
