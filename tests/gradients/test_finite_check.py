"""check_finite=True: every rank raises, names parameter and rank, and no average is written."""

import math
from typing import Any

import pytest
import torch
from support.native_extension import SHARED_MEMORY
from support.processes import in_ranks, run_ranks
from torch import nn

import psengine
from psengine.errors import NonFiniteGradientError


class Poisonable(nn.Module):
    """Three layers; the middle one's weight gets the gradient ``poison`` adds."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor, poison: float = 0.0) -> torch.Tensor:
        y = self.last(self.middle(self.first(x)))
        return y.sum() + (self.middle.weight[0, :2] * poison).sum()


def poisoned(
    rank: int, world_size: int, value: float, guilty: tuple[int, ...], options: dict[str, Any], width: int
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = psengine.DistributedDataParallel(Poisonable(width), check_finite=True, **options)
    x = torch.ones(2, width)
    for _ in range(2):  # buckets are rebuilt in between
        model.zero_grad()
        model(x).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=False)
    try:
        model(x, value if rank in guilty else 0.0).backward()
    except NonFiniteGradientError as error:
        own = {name: p.grad.clone() for name, p in model.named_parameters()}
        found = {"ranks": error.ranks, "parameters": error.parameters, "message": str(error), "own": own}
    else:
        raise AssertionError("nothing was raised")
    # The ranks are still in step: the next backward is as if nothing had happened.
    model.zero_grad()
    model(x).backward()
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, before[name]), name
    return found


# Small gradients are packed together, large ones each on its own.
@pytest.mark.parametrize(("value", "width"), [(math.nan, 4), (math.inf, 200)])
@pytest.mark.parametrize("collective", ["c10d", SHARED_MEMORY])
def test_every_rank_names_the_guilty_one(value, width, collective):
    options = {"collective": collective}
    results = run_ranks(poisoned, 3, value, (1,), options, width)
    for rank, result in enumerate(results):
        assert result["ranks"] == (1,)
        assert result["parameters"] == ("middle.weight",)
        assert "rank 1: 2 values, first in parameter 'middle.weight'" in result["message"]
        for name, gradient in result["own"].items():
            is_poisoned = rank == 1 and name == "module.middle.weight"
            assert gradient.isfinite().all() != is_poisoned, f"an average was written to {name}"


class Sometimes(nn.Module):
    """One of its layers is for some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.rare = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, uses_rare: bool) -> torch.Tensor:
        y = self.common(x)
        return self.rare(y) if uses_rare else y


@in_ranks(2)
def test_a_static_graph_knows_what_others_use_though_its_first_backward_raised(rank, world_size):
    torch.manual_seed(0)
    model = psengine.DistributedDataParallel(Sometimes(), static_graph=True, check_finite=True)
    with pytest.raises(NonFiniteGradientError):
        model(torch.full((1, 4), math.nan), rank == 0).sum().backward()
    model.zero_grad()
    model(torch.ones(1, 4), rank == 0).sum().backward()
    assert model.module.rare.bias.grad.tolist() == [0.5] * 4, f"rank {rank}: rank 0 used it"


def test_a_single_rank_is_told_too():
    [result] = run_ranks(poisoned, 1, math.inf, (0,), {}, 4)
    assert result["ranks"] == (0,)


class SparseAndUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.unused = nn.Embedding(5, 2, sparse=True), nn.Linear(2, 2)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.embedding(indices)


def sparse_and_undefined(rank: int, world_size: int) -> tuple[str, bool]:
    model = psengine.DistributedDataParallel(SparseAndUnused(), check_finite=True, find_unused_parameters=True)
    try:
        (model(torch.tensor([0, 3])) * (math.nan if rank == 1 else 1.0)).sum().backward()
    except NonFiniteGradientError as error:
        return str(error), bool(model.module.embedding.weight.grad.to_dense().isfinite().all())
    raise AssertionError("nothing was raised")


def test_sparse_gradients_are_counted():
    results = run_ranks(sparse_and_undefined, 2)
    for message, _ in results:
        assert "rank 1: 4 values, first in parameter 'embedding.weight'" in message
    assert results[0][1], "the healthy rank's gradient became the average"


def on_servers(rank: int, world_size: int) -> str:
    model = psengine.DistributedDataParallel(Poisonable(), strategy="sync-server", check_finite=True)
    model(torch.ones(2, 4)).backward()
    try:
        if rank == 1:
            model(torch.ones(2, 4), math.nan).backward()
    except NonFiniteGradientError as error:
        return str(error)
    finally:
        model.leave()
    return "finite"


def test_over_servers_the_guilty_worker_raises():
    first, second = run_ranks(on_servers, 2)
    assert first == "finite"
    assert "rank 1: 2 values, first in parameter 'middle.weight'" in second
