"""check_finite=True: every rank raises, names parameter and rank, and no average is written."""

import math
from typing import Any

import pytest
import torch
from support.expectations import raises
from support.native_extension import SHARED_MEMORY
from support.native_twins import Net
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
) -> None:
    torch.manual_seed(0)
    model = psengine.DistributedDataParallel(Poisonable(width), check_finite=True, **options)
    x = torch.ones(2, width)
    for _ in range(2):  # buckets are rebuilt in between
        model.zero_grad()
        model(x).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=False)
    with pytest.raises(NonFiniteGradientError) as raised:
        model(x, value if rank in guilty else 0.0).backward()
    assert (raised.value.ranks, raised.value.parameters) == (guilty, ("middle.weight",))
    assert f"rank {guilty[0]}: 2 values, first in parameter 'middle.weight'" in str(raised.value)
    for name, p in model.named_parameters():
        is_poisoned = rank in guilty and name == "module.middle.weight"
        assert p.grad.isfinite().all() != is_poisoned, f"an average was written to {name}"
    # The ranks are still in step: the next backward is as if nothing had happened.
    model.zero_grad()
    model(x).backward()
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, before[name]), name


# Small gradients are packed together, large ones each on its own.
@pytest.mark.parametrize(("value", "width"), [(math.nan, 4), (math.inf, 200)])
@pytest.mark.parametrize("collective", ["c10d", SHARED_MEMORY])
def test_every_rank_names_the_guilty_one(value, width, collective):
    run_ranks(poisoned, 3, value, (1,), {"collective": collective}, width)


@in_ranks(2)
def test_a_static_graph_knows_what_others_use_though_its_first_backward_raised(rank, world_size):
    torch.manual_seed(0)
    model = psengine.DistributedDataParallel(Net(), static_graph=True, check_finite=True)
    with pytest.raises(NonFiniteGradientError):
        model(torch.full((1, 4), math.nan), rank == 0).sum().backward()
    model.zero_grad()
    model(torch.ones(1, 4), rank == 0).sum().backward()
    assert model.module.spare.bias.grad.tolist() == [0.5] * 4, f"rank {rank}: rank 0 used it"


def test_a_single_rank_is_told_too():
    run_ranks(poisoned, 1, math.inf, (0,), {}, 4)


class SparseAndUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.unused = nn.Embedding(5, 2, sparse=True), nn.Linear(2, 2)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.embedding(indices)


@in_ranks(2)
def test_sparse_gradients_are_counted(rank, world_size):
    model = psengine.DistributedDataParallel(SparseAndUnused(), check_finite=True, find_unused_parameters=True)
    with raises(NonFiniteGradientError, "rank 1: 4 values, first in parameter 'embedding.weight'"):
        (model(torch.tensor([0, 3])) * (math.nan if rank == 1 else 1.0)).sum().backward()
    is_finite = bool(model.module.embedding.weight.grad.to_dense().isfinite().all())
    assert is_finite == (rank == 0), "the healthy rank's gradient became the average"


@in_ranks(2)
def test_over_servers_the_guilty_worker_raises(rank, world_size):
    model = psengine.DistributedDataParallel(Poisonable(), strategy="sync-server", check_finite=True)
    model(torch.ones(2, 4)).backward()
    if rank == 1:
        with raises(NonFiniteGradientError, "rank 1: 2 values, first in parameter 'middle.weight'"):
            model(torch.ones(2, 4), math.nan).backward()
    model.leave()
