"""Kinds of layers, and of parameters."""

import torch
from torch import Tensor, nn
from ways_of_training.networks import classify, mlp, train
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


@row(
    sync_server=refused("sparse"),
    one_worker=refused("sparse"),
)
def sparse_words(run: Run) -> None:
    """Sparse embedding gradients under SparseAdam, dense ones under SGD."""
    model = run.wrap(nn.Sequential(nn.EmbeddingBag(WORDS, 8, sparse=True), nn.Linear(8, 8), nn.Linear(8, CLASSES)))
    sparse = torch.optim.SparseAdam(model.module[0].parameters(), lr=0.01)
    dense = torch.optim.SGD(model.module[1:].parameters(), lr=0.1)
    for x, y in texts(run):
        model.zero_grad()
        classify(model, x, y).backward()
        sparse.step()
        dense.step()


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

    train(run, run.wrap(Tied()), batches=texts(run))


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

    train(run, run.wrap(Loose()))


@row(native=refused("uninitialized"), everywhere=refused("uninitialized"))
def lazy_layers_too_late(run: Run) -> None:
    """LazyLinear that is wrapped before its first forward."""
    train(run, run.wrap(nn.Sequential(nn.LazyLinear(CLASSES))))


@row
def weights_as_views_of_one(run: Run) -> None:
    """Parameters that are views of one flat tensor."""
    network = mlp()
    flat = nn.utils.parameters_to_vector(network.parameters()).detach()
    start = 0
    for parameter in network.parameters():
        parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    train(run, run.wrap(network))
