"""Kinds of layers, and of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from ways_of_training.networks import Pieces, classify, mlp
from ways_of_training.run import CLASSES, WIDTH, Batch, Run
from ways_of_training.table import refused, row

WORDS = 12


def texts(run: Run, steps: int = 3) -> list[Batch]:
    """Words and labels."""
    batches = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + run.rank)
        words = torch.randint(WORDS, (3, 5), generator=generator)
        batches.append((words, torch.randint(CLASSES, (3,), generator=generator)))
    return batches


def train(run: Run, module: nn.Module, batches: Any = None, **options: Any) -> Any:
    model = run.wrap(module, **options)
    optimizer = run.sgd(model)
    for x, y in batches or run.batches():
        optimizer.zero_grad()
        loss = classify(model, x, y)
        loss.backward()
        optimizer.step()
        run.note(loss)
    return model


class Reader(nn.Module):
    """Words to vectors, through ``core``, to the scores of the last one."""

    def __init__(self, core: nn.Module, **options: Any) -> None:
        super().__init__()
        self.words, self.core, self.head = nn.Embedding(WORDS, 8, **options), core, nn.Linear(8, CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.core(self.words(text))
        return self.head((hidden[0] if isinstance(hidden, tuple) else hidden)[:, -1])


@row(slow=True)
def recurrent(run: Run) -> None:
    """RNN of two layers."""
    train(run, Reader(nn.RNN(8, 8, num_layers=2, batch_first=True)), texts(run))


@row
def lstm(run: Run) -> None:
    """LSTM, in both directions, with dropout between layers."""
    core = nn.Sequential(nn.LSTM(8, 4, 2, batch_first=True, bidirectional=True, dropout=0.2))
    train(run, Reader(core), texts(run))


@row
def gru_with_kept_state(run: Run) -> None:
    """GRU whose hidden state goes from batch to batch, detached."""

    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core, self.head = nn.GRU(WIDTH, 8), nn.Linear(8, CLASSES)

        def forward(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
            output, state = self.core(x[None], state)
            return self.head(output[0]), state

    model = run.wrap(Stateful())
    optimizer = run.sgd(model)
    state = None
    for x, y in run.training(optimizer):
        scores, state = model(x, state)
        F.cross_entropy(scores, y).backward()
        state = state.detach()


@row
def transformer(run: Run) -> None:
    """TransformerEncoderLayer with dropout."""
    core = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.1, batch_first=True)
    train(run, Reader(core), texts(run))


@row(slow=True)
def packed_sequences(run: Run) -> None:
    """Sequences of unequal length, packed."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.core, self.head = nn.Embedding(WORDS, 8), nn.GRU(8, 8), nn.Linear(8, CLASSES)

        def forward(self, text: Tensor) -> Tensor:
            vectors = self.words(text).transpose(0, 1)
            packed = nn.utils.rnn.pack_padded_sequence(vectors, torch.tensor([2, 5, 3]), enforce_sorted=False)
            return self.head(self.core(packed)[1][-1])

    train(run, Packed(), texts(run))


@row
def convolution_with_batch_norm(run: Run) -> None:
    """Conv2d, GroupNorm, LayerNorm, pooling."""
    network = nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d((1, 2)),
        nn.Flatten(), nn.LayerNorm(4), nn.Linear(4, CLASSES),
    )  # fmt: skip
    train(run, network)


@row(slow=True)
def transposed_convolution(run: Run) -> None:
    """ConvTranspose1d and Conv1d."""
    network = nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.ConvTranspose1d(2, 3, 2), nn.Tanh(), nn.Conv1d(3, 2, 2), nn.Flatten(),
        nn.Linear(6, CLASSES),
    )  # fmt: skip
    train(run, network)


@row(slow=True)
def words_with_padding(run: Run) -> None:
    """Embedding with padding_idx and scaled by frequency."""
    train(run, Reader(nn.Identity(), padding_idx=0, scale_grad_by_freq=True), texts(run))


@row
def words_renormalised_in_forward(run: Run) -> None:
    """Embedding with max_norm, which writes to its weights in forward."""
    train(run, Reader(nn.Identity(), max_norm=1.0), texts(run))


@row(
    sync_server=refused("sparse"),
    one_worker=refused("sparse"),
)
def sparse_words(run: Run) -> None:
    """Sparse embedding gradients under SparseAdam, dense ones under SGD."""
    model = run.wrap(Reader(nn.Linear(8, 8), sparse=True))
    sparse = torch.optim.SparseAdam(model.module.words.parameters(), lr=0.01)
    dense = torch.optim.SGD([*model.module.core.parameters(), *model.module.head.parameters()], lr=0.1)
    for x, y in texts(run):
        model.zero_grad()
        classify(model, x, y).backward()
        sparse.step()
        dense.step()


@row(slow=True)
def bag_of_words(run: Run) -> None:
    """EmbeddingBag."""
    train(run, nn.Sequential(nn.EmbeddingBag(WORDS, 8, mode="mean"), nn.Linear(8, CLASSES)), texts(run))


@row
def tied_weights(run: Run) -> None:
    """The embedding's weights are the head's."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS, bias=False)
            self.head.weight = self.words.weight

        def forward(self, text: Tensor) -> Tensor:
            return self.head(torch.tanh(self.words(text))).mean(1)

    train(run, Tied(), texts(run))


@row
def one_layer_used_thrice(run: Run) -> None:
    """One layer is called three times in a forward."""

    class Shared(Pieces):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.body(x))
            for _ in range(3):
                hidden = hidden + F.pad(torch.tanh(self.spare(hidden)), (0, 5))
            return self.head(hidden)

    train(run, Shared())


@row(slow=True)
def siamese(run: Run) -> None:
    """Two inputs through the same network inside one forward."""

    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = mlp(8)

        def forward(self, x: Tensor) -> Tensor:
            return (self.network(x) - self.network(x.flip(0))).abs()

    train(run, Twins())


def _with(change: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    return nn.Sequential(change(nn.Linear(WIDTH, 8)), nn.Tanh(), change(nn.Linear(8, CLASSES)))


@row
def weight_norm(run: Run) -> None:
    """parametrizations.weight_norm."""
    train(run, _with(parametrizations.weight_norm))


@row(slow=True)
def orthogonal_weights(run: Run) -> None:
    """parametrizations.orthogonal."""
    train(run, _with(parametrizations.orthogonal))


@row
def parametrization_of_ones_own(run: Run) -> None:
    """A parametrization that makes weights symmetric."""

    class Symmetric(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.triu() + weight.triu(1).mT

    square = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(square, "weight", Symmetric())
    train(run, nn.Sequential(square, nn.Tanh(), nn.Linear(WIDTH, CLASSES)))


@row
def parameters_in_lists_and_dicts(run: Run) -> None:
    """ParameterList and ParameterDict, a scalar and a parameter without elements."""

    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ParameterList([torch.randn(WIDTH, 4), torch.randn(4, CLASSES)])
            self.more = nn.ParameterDict({"scale": torch.tensor(1.5), "none": torch.zeros(0), "shift": torch.zeros(1)})

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(x @ self.layers[0]) * self.more["scale"]
            return hidden @ self.layers[1] + self.more["shift"] + self.more["none"].sum()

    train(run, Loose())


@row
def branch_without_parameters(run: Run) -> None:
    """A forward that takes a branch without parameters, differently on each rank, with find_unused_parameters."""

    class Branches(Pieces):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            hidden = torch.tanh(self.body(x))
            return self.head(hidden) + (self.spare(hidden) if (self.calls + run.rank) % 2 else hidden[:, :CLASSES])

    train(run, Branches(), find_unused_parameters=True)


@row(slow=True)
def layers_dropped_at_random(run: Run) -> None:
    """Stochastic depth with a random state of each rank's own, with find_unused_parameters."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inlet, self.outlet = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.inlet(x)
            for block in self.blocks:
                if torch.rand(()) > 0.4:
                    x = x + torch.tanh(block(x))
            return self.outlet(x)

    train(run, Deep(), find_unused_parameters=True)


@row
def experts(run: Run) -> None:
    """A mixture of experts: each sample goes to one, some experts get none."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, 3)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = self.gate(x).softmax(1).max(1)
            output = x.new_zeros(len(x), CLASSES)
            for index, expert in enumerate(self.experts):
                mine = (chosen == index).nonzero().flatten()
                if len(mine):
                    output = output.index_add(0, mine, expert(x[mine]) * weights[mine, None])
            return output

    train(run, Experts(), find_unused_parameters=True)


@row
def dropout_with_own_generators(run: Run) -> None:
    """Dropout and noise whose random state differs from rank to rank."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.generator = mlp(), None

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(run.rank))
            return F.dropout(self.network(x + 0.1 * noise), 0.3)

    train(run, Noisy())


@row(slow=True)
def lazy_layers(run: Run) -> None:
    """LazyLinear, made real by a dry run before wrapping."""
    network = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(CLASSES))
    network(torch.zeros(1, WIDTH))
    train(run, network)


@row(native=refused("uninitialized"), everywhere=refused("uninitialized"))
def lazy_layers_too_late(run: Run) -> None:
    """LazyLinear that is wrapped before its first forward."""
    train(run, nn.Sequential(nn.LazyLinear(CLASSES)))


@row
def weights_as_views_of_one(run: Run) -> None:
    """Parameters that are views of one flat tensor."""
    network = mlp()
    flat = nn.utils.parameters_to_vector(network.parameters()).detach()
    start = 0
    for parameter in network.parameters():
        parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    train(run, network)


@row(slow=True)
def low_rank_adapters(run: Run) -> None:
    """LoRA: a frozen base, two small matrices that are trained."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(WIDTH, CLASSES).requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, CLASSES, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    train(run, Adapted())


@row(slow=True)
def pruned(run: Run) -> None:
    """torch.nn.utils.prune: masks over weights."""
    from torch.nn.utils import prune

    network = mlp()
    torch.manual_seed(3)
    for layer in (network[0], network[2]):
        prune.random_unstructured(layer, "weight", amount=0.3)
    train(run, network)


@row(slow=True)
def traced(run: Run) -> None:
    """A module that torch.fx traced."""
    train(run, torch.fx.symbolic_trace(mlp()))
