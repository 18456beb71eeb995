"""The zoo: small models, one for each thing data-parallel training is known to get wrong, as one table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Batch = tuple[Tensor, ...]


def cross_entropy_of_first(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output, batch[-1])


def run_once(model: nn.Module, batch: Batch, loss: Callable[[Any, Batch], Tensor]) -> Tensor:
    return loss(model(*batch[:-1]), batch)


def run_twice(model: nn.Module, batch: Batch, loss: Callable[[Any, Batch], Tensor]) -> Tensor:
    """Two forwards, then one backward through both, as in contrastive and adversarial training."""
    inputs, targets = batch
    return loss(model(inputs), batch) + loss(model(inputs.flip(0)), (inputs, targets.flip(0)))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model and the way it is trained.

    Attributes:
        build: makes the module from a seed; the same seed makes the same weights.
        batch: makes the last-is-target tuple of micro-batch ``index`` on ``rank``.
        loss: scalar from the model's output and the batch.
        options: keyword options of the wrapper.
        forward: runs the wrapped model on a batch and returns the loss.
        register: called once with the wrapped model, for communication hooks.
        set_to_none: how ``zero_grad`` is called.
        first_step_whole: accumulation begins in the second step.
        core: one of the models whose every cell runs in the quick suite.
        accumulates: whether there is an accumulating cell.
    """

    name: str
    build: Callable[[int], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[Any, Batch], Tensor] = cross_entropy_of_first
    options: Mapping[str, Any] = field(default_factory=dict)
    forward: Callable[[nn.Module, Batch, Callable[[Any, Batch], Tensor]], Tensor] = run_once
    register: Callable[[Any], None] | None = None
    set_to_none: bool = True
    first_step_whole: bool = False
    core: bool = False
    accumulates: bool = True


def _generator(index: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * (rank + 1) + index)


def vectors(width: int, classes: int, rows: int = 6) -> Callable[[int, int], Batch]:
    def batch(index: int, rank: int) -> Batch:
        generator = _generator(index, rank)
        return torch.randn(rows, width, generator=generator), torch.randint(classes, (rows,), generator=generator)

    return batch


def images(index: int, rank: int) -> Batch:
    generator = _generator(index, rank)
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(5, (4,), generator=generator)


def tokens(index: int, rank: int) -> Batch:
    text = torch.randint(48, (2, 13), generator=_generator(index, rank))
    return text[:, :-1], text[:, 1:].flatten()


def seeded(module: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return module()

    return build


def mlp(*widths: int, bias: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs, bias=bias), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class ConvolutionalNet(nn.Module):
    """Convolutions and batch norms: gradients of four dimensions, float and integer buffers."""

    def __init__(self, memory_format: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        self.memory_format = memory_format
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        )
        self.head = nn.Linear(16, 5)
        self.to(memory_format=memory_format)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images.contiguous(memory_format=self.memory_format)).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Transformer(nn.Module):
    """Causal language model with dropout and tied embeddings."""

    def __init__(self, vocabulary: int = 48, width: int = 24, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(1, 12, width) * 0.02)
        self.dropout = nn.Dropout(0.1)
        self.attention = nn.ModuleList(Attention(width, 2) for _ in range(layers))
        self.feed_forward = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.dropout(self.tokens(text) + self.positions)
        for layer, (attention, feed_forward) in enumerate(zip(self.attention, self.feed_forward, strict=True)):
            x = x + self.dropout(attention(self.norms[2 * layer](x)))
            x = x + self.dropout(feed_forward(self.norms[2 * layer + 1](x)))
        return self.head(self.norms[-1](x)).flatten(0, 1)


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


def routed_alike(index: int, rank: int) -> Batch:
    """Every rank uses the same experts."""
    inputs, targets = vectors(9, 4)(index, rank)
    return inputs, routed(index, 0)[1], targets


def routed(index: int, rank: int) -> Batch:
    """Expert 0 is used by all or nobody, 1 by one rank at a time, 2 by most ranks; in some steps none is."""
    inputs, targets = vectors(9, 4)(index, rank)
    used = [index % 4 == 0, index % 3 == rank, (index + rank) % 5 < 3]
    chosen = [] if index % 7 == 0 else [expert for expert, use in enumerate(used) if use]
    return inputs, torch.tensor(chosen, dtype=torch.long), targets


def loss_of_scores(output: dict[str, Any], batch: Batch) -> Tensor:
    return F.cross_entropy(output["scores"][0], batch[-1])


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
        return self.outlet(torch.tanh(self.twin(x)))


class SparseText(nn.Module):
    """Sparse gradients from an embedding and an embedding bag, between dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(48, 8, sparse=True)
        self.hidden = nn.Linear(16, 16)
        self.bag = nn.EmbeddingBag(48, 8, sparse=True, mode="sum")
        self.head = nn.Linear(16, 4)

    def forward(self, text: Tensor) -> Tensor:
        both = torch.cat([self.words(text).mean(1), self.bag(text)], dim=1)
        return self.head(torch.tanh(self.hidden(both)))


def labelled_text(index: int, rank: int) -> Batch:
    generator = _generator(index, rank)
    return torch.randint(48, (3, 5), generator=generator), torch.randint(4, (3,), generator=generator)


class Checkpointed(nn.Module):
    """Blocks recomputed in backward; ``reuse`` calls the last one twice, which needs a static graph if reentrant."""

    def __init__(self, *, use_reentrant: bool, reuse: bool) -> None:
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
        return self.outlet(x)


class MixedDtypes(nn.Module):
    """Layers in float32, float64 and bfloat16 take turns, so every bucket has to be split by dtype."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.bfloat16, torch.float64]
        widths = [10, 12, 17, 12, 9, 12, 4]
        self.layers = nn.ModuleList(
            nn.Linear(inputs, outputs, dtype=dtype)
            for inputs, outputs, dtype in zip(widths, widths[1:], dtypes, strict=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(torch.tanh(x).to(layer.weight.dtype))
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
        return self.last(torch.tanh(self.middle(x)) * self.gate.view(1, 1) + self.shift)


def compress_to_half(model: Any) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


CASES = (
    Case(
        name="mlp",
        core=True,
        build=seeded(lambda: mlp(20, 48, 48, 10)),
        batch=vectors(20, 10),
        options={"bucket_cap_mb": 0.0018},
    ),
    Case(
        name="mlp, default bucket sizes",
        build=seeded(lambda: mlp(20, 400, 400, 400, 10)),
        batch=vectors(20, 10),
    ),
    Case(
        name="mlp, bucket sizes listed",
        build=seeded(lambda: mlp(20, 48, 48, 48, 10)),
        batch=vectors(20, 10),
        options={"bucket_cap_mb_list": [0.003, 0.012, 0.006]},
    ),
    Case(
        name="mlp, bucket views",
        build=seeded(lambda: mlp(20, 48, 48, 10)),
        batch=vectors(20, 10),
        options={"bucket_cap_mb": 0.005, "gradient_as_bucket_view": True},
    ),
    Case(
        name="mlp, bucket views kept",
        build=seeded(lambda: mlp(20, 48, 48, 10)),
        batch=vectors(20, 10),
        options={"bucket_cap_mb": 0.005, "gradient_as_bucket_view": True},
        set_to_none=False,
    ),
    Case(
        name="mlp, gradients kept",
        build=seeded(lambda: mlp(20, 48, 48, 10)),
        batch=vectors(20, 10),
        options={"bucket_cap_mb": 0.005},
        set_to_none=False,
    ),
    Case(
        name="mlp, batched copy",
        build=seeded(lambda: mlp(20, 48, 48, 10)),
        batch=vectors(20, 10),
        options={"bucket_cap_mb": 0.005, "batched_grad_copy": True},
    ),
    Case(
        name="mlp, half-precision hook",
        build=seeded(lambda: mlp(20, 48, 48, 10)),
        batch=vectors(20, 10),
        options={"bucket_cap_mb": 0.005},
        register=compress_to_half,
    ),
    Case(
        name="mlp, two forwards",
        build=seeded(lambda: mlp(20, 48, 48, 10)),
        batch=vectors(20, 10),
        options={"bucket_cap_mb": 0.005},
        forward=run_twice,
    ),
    Case(
        name="many buckets",
        build=seeded(lambda: mlp(12, *[16] * 7, 4)),
        batch=vectors(12, 4),
        options={"bucket_cap_mb": 0.001},
    ),
    Case(
        name="odd sizes",
        build=seeded(OddSizes),
        batch=vectors(7, 3),
        options={"bucket_cap_mb": 0.0002},
    ),
    Case(
        name="mixed dtypes",
        build=seeded(MixedDtypes),
        batch=vectors(10, 4),
        options={"bucket_cap_mb": 0.002},
    ),
    Case(
        name="batch norm",
        core=True,
        build=seeded(ConvolutionalNet),
        batch=images,
        options={"bucket_cap_mb": 0.002},
    ),
    Case(
        name="batch norm, own buffers",
        build=seeded(ConvolutionalNet),
        batch=images,
        options={"bucket_cap_mb": 0.002, "forward_sync_buffers": False},
    ),
    Case(
        name="channels last",
        build=seeded(lambda: ConvolutionalNet(torch.channels_last)),
        batch=images,
        options={"bucket_cap_mb": 0.002},
    ),
    Case(
        name="channels last, bucket views",
        build=seeded(lambda: ConvolutionalNet(torch.channels_last)),
        batch=images,
        options={"bucket_cap_mb": 0.002, "gradient_as_bucket_view": True},
    ),
    Case(
        name="transformer",
        core=True,
        build=seeded(Transformer),
        batch=tokens,
        options={"bucket_cap_mb": 0.02},
    ),
    Case(
        name="unused parameters",
        core=True,
        build=seeded(Experts),
        batch=routed,
        loss=loss_of_scores,
        options={"bucket_cap_mb": 0.002, "find_unused_parameters": True},
    ),
    Case(
        name="unused parameters, bucket views kept",
        build=seeded(Experts),
        batch=routed,
        loss=loss_of_scores,
        options={"bucket_cap_mb": 0.002, "find_unused_parameters": True, "gradient_as_bucket_view": True},
        set_to_none=False,
    ),
    Case(
        # Where ranks use different parameters, native DDP's skipping sends unequal sizes and gloo aborts the process.
        name="unused parameters, reduction skipped",
        build=seeded(Experts),
        batch=routed_alike,
        loss=loss_of_scores,
        options={"bucket_cap_mb": 0.002, "find_unused_parameters": True, "skip_all_reduce_unused_params": True},
        # Native forgets what no_sync used, skips its bucket and leaves the ranks with different gradients. Ours does
        # not: wrapper/test_ddp.py, test_what_no_sync_accumulates_is_exchanged.
        accumulates=False,
    ),
    Case(
        name="shared parameters",
        core=True,
        build=seeded(Shared),
        batch=vectors(10, 4),
        options={"bucket_cap_mb": 0.0005},
    ),
    Case(
        name="sparse embeddings",
        core=True,
        build=seeded(SparseText),
        batch=labelled_text,
        options={"bucket_cap_mb": 0.001},
    ),
    Case(
        name="checkpointed",
        build=seeded(lambda: Checkpointed(use_reentrant=False, reuse=False)),
        batch=vectors(10, 4),
        options={"bucket_cap_mb": 0.002},
    ),
    Case(
        name="checkpointed, reentrant, static graph",
        core=True,
        build=seeded(lambda: Checkpointed(use_reentrant=True, reuse=True)),
        batch=vectors(10, 4),
        options={"bucket_cap_mb": 0.002, "static_graph": True},
        first_step_whole=True,  # native DDP counts uses in the first backward and fails on an assertion if it is local
    ),
)

CASES_BY_NAME = {case.name: case for case in CASES}
