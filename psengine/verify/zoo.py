"""The zoo: small models, one for each thing that data-parallel training is known to get wrong.

``psengine verify`` trains them where no target is named; the parity tests train them in many more ways.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ROWS = 8
WORDS = 32
# The target is the last.
Batch = tuple[Tensor, ...]


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of most models."""
    return F.cross_entropy(model(*batch[:-1]).flatten(0, -2), batch[-1].flatten())


def halves(model: nn.Module, batch: Batch) -> Tensor:
    """Accumulate the gradients of two halves of a batch, the first under ``no_sync``."""
    first, second = zip(*(part.chunk(2) for part in batch), strict=True)
    with model.no_sync():  # type: ignore[operator]
        (cross_entropy(model, first) / 2).backward()
    return cross_entropy(model, second) / 2


@dataclass(frozen=True, kw_only=True)
class ZooModel:
    """A built-in target.

    Attributes:
        asks: what it demands of data-parallel training, for the table.
        module: makes the model.
        batch: makes batch ``index`` of a rank.
        loss: of the wrapped model and a batch.
        optimizer: makes the optimizer of a list of parameters.
        options: keyword arguments for both wrappers.
    """

    asks: str
    module: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor] = cross_entropy
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = momentum
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> tuple[Any, ...]:
        """The target function."""
        return self.module(), self.batch, self.loss, self.optimizer, self.options


def _generator(index: int, rank: int) -> torch.Generator:
    """A batch depends only on its index and the rank."""
    return torch.Generator().manual_seed(1_000_003 * (rank + 1) + index)


def vectors(width: int, classes: int) -> Callable[[int, int], Batch]:
    """Random rows and labels."""

    def batch(index: int, rank: int) -> Batch:
        generator = _generator(index, rank)
        return torch.randn(ROWS, width, generator=generator), torch.randint(classes, (ROWS,), generator=generator)

    return batch


def images(index: int, rank: int) -> Batch:
    """Random images and labels."""
    generator = _generator(index, rank)
    return torch.randn(ROWS, 3, 8, 8, generator=generator), torch.randint(4, (ROWS,), generator=generator)


def text(index: int, rank: int) -> Batch:
    """Random words; the target of each is the next."""
    words = torch.randint(WORDS, (ROWS, 9), generator=_generator(index, rank))
    return words[:, :-1], words[:, 1:]


def labelled_text(index: int, rank: int) -> Batch:
    """Random words and labels."""
    generator = _generator(index, rank)
    return torch.randint(WORDS, (ROWS, 5), generator=generator), torch.randint(4, (ROWS,), generator=generator)


def routed(index: int, rank: int) -> Batch:
    """Expert 0 is used by all or nobody, 1 by one rank at a time, 2 by most ranks; in some steps none is."""
    inputs, targets = vectors(9, 4)(index, rank)
    used = [index % 4 == 0, index % 3 == rank, (index + rank) % 5 < 3]
    chosen = [] if index % 7 == 0 else [expert for expert, use in enumerate(used) if use]
    return inputs, torch.tensor(chosen, dtype=torch.long), targets


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with tanh between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def _dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), *mlp(64, 64, 4))


class Convolutional(nn.Module):
    """Convolutions and batch norms: gradients of four dimensions, float and integer buffers."""

    def __init__(self, memory_format: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        self.memory_format = memory_format
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2),
            nn.BatchNorm2d(16, momentum=None),
            nn.ReLU(),
        )
        self.head = nn.Linear(16, 4)
        self.to(memory_format=memory_format)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        features = self.features(images.contiguous(memory_format=self.memory_format))
        return self.head(features.mean((2, 3)))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Causal language model with dropout, and one weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, 32)
        self.positions = nn.Parameter(torch.randn(8, 32) * 0.02)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, WORDS)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(8))

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(words) + self.positions, mask=self.mask))  # type: ignore[no-any-return]


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, 24)
        self.cells = nn.LSTM(24, 32, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(32, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.cells(self.tokens(words))[0])  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Parameters that nobody uses, that some ranks use, and that only lead to an output the loss ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(9, 16)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.never = nn.Linear(16, 16)
        self.ignored_head = nn.Linear(16, 2)
        self.head = nn.Linear(16, 4)

    def forward(self, inputs: Tensor, chosen: Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.trunk(inputs))
        for index in chosen.tolist():
            hidden = hidden + torch.tanh(self.experts[index](hidden))
        return {"auxiliary": [self.ignored_head(hidden)], "scores": (self.head(hidden),)}


def _scores(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(*batch[:-1])["scores"][0], batch[-1])


class Shared(nn.Module):
    """One layer called three times, one weight in two modules, one parameter frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(10, 12)
        self.again = nn.Linear(12, 12)
        self.twin = nn.Linear(12, 12)
        self.twin.weight = self.again.weight
        self.frozen = nn.Parameter(torch.randn(12), requires_grad=False)
        self.outlet = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inlet(x))
        for _ in range(3):
            x = torch.tanh(self.again(x)) * self.frozen
        return self.outlet(torch.tanh(self.twin(x)))  # type: ignore[no-any-return]


class SparseText(nn.Module):
    """Sparse gradients from an embedding and an embedding bag, between dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8, sparse=True)
        self.hidden = nn.Linear(16, 16)
        self.bag = nn.EmbeddingBag(WORDS, 8, sparse=True, mode="sum")
        self.head = nn.Linear(16, 4)

    def forward(self, words: Tensor) -> Tensor:
        both = torch.cat([self.words(words).mean(1), self.bag(words)], dim=1)
        return self.head(torch.tanh(self.hidden(both)))  # type: ignore[no-any-return]


class MixedDtypes(nn.Module):
    """Layers in float32, float64 and bfloat16 take turns, so that every bucket has to be split by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.bfloat16, torch.float64]
        widths = itertools.pairwise([10, 12, 17, 12, 9, 12, 4])
        self.layers = nn.ModuleList(
            nn.Linear(inputs, outputs, dtype=dtype)
            for (inputs, outputs), dtype in zip(widths, self.dtypes, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer, dtype in zip(self.layers, self.dtypes, strict=True):
            x = layer(torch.tanh(x).to(dtype))
        return x


class OddSizes(nn.Module):
    """No biases, prime widths, a scalar and parameters of one element, used in another order than declared."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(11, 3, bias=False)
        self.shift = nn.Parameter(torch.zeros(1))
        self.first = nn.Linear(7, 13, bias=False)
        self.gate = nn.Parameter(torch.full((1, 1, 1), 0.5))
        self.middle = nn.Linear(13, 11, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * self.scale
        return self.last(torch.tanh(self.middle(x)) * self.gate.view(1, 1) + self.shift)  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    """Blocks recomputed in backward; ``reuse`` calls the last one twice, which needs a static graph if reentrant."""

    def __init__(self, *, use_reentrant: bool = False, reuse: bool = False) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.inlet = nn.Linear(10, 12)
        self.blocks = nn.ModuleList(mlp(12, 24, 12) for _ in range(3))
        self.outlet = nn.Linear(12, 4)
        self.calls = [0, 1, 2, 2] if reuse else [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inlet(x))
        for index in self.calls:
            x = x + checkpoint(self.blocks[index], x, use_reentrant=self.use_reentrant)
        return self.outlet(x)  # type: ignore[no-any-return]


def _frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
    model[0].requires_grad_(False)
    return model


ZOO = {
    "mlp": ZooModel(asks="dropout; momentum", module=_dropout, batch=vectors(16, 4)),
    "cnn": ZooModel(asks="BatchNorm's running statistics", module=Convolutional, batch=images),
    # Not Adam: the gradient of the attention's key bias is only rounding error, which Adam would turn into full steps.
    "transformer": ZooModel(asks="attention with dropout; one weight in two places", module=Transformer, batch=text),
    "rnn": ZooModel(asks="LSTM with dropout; AdamW", module=_Recurrent, batch=text, optimizer=adamw),
    "unused": ZooModel(
        asks="parameters that a rank, or all, leave unused",
        module=Experts,
        batch=routed,
        loss=_scores,
        options={"find_unused_parameters": True},
    ),
    "tied": ZooModel(asks="one layer called three times; AdamW", module=Shared, batch=vectors(10, 4), optimizer=adamw),
    "sparse": ZooModel(asks="sparse embedding gradients", module=SparseText, batch=labelled_text),
    "mixed": ZooModel(asks="float32, float64 and bfloat16 parameters", module=MixedDtypes, batch=vectors(10, 4)),
    "odd": ZooModel(asks="scalars, prime widths, another order of use", module=OddSizes, batch=vectors(7, 3)),
    "checkpointed": ZooModel(asks="activations recomputed in backward", module=Checkpointed, batch=vectors(10, 4)),
    "frozen": ZooModel(
        asks="frozen layer, views, static graph",
        module=_frozen,
        batch=vectors(16, 4),
        optimizer=adamw,
        options={"gradient_as_bucket_view": True, "static_graph": True},
    ),
    "accumulation": ZooModel(
        asks="gradients accumulated under no_sync", module=lambda: mlp(16, 32, 4), batch=vectors(16, 4), loss=halves
    ),
}
