"""What hooks must notice in every iteration holds where they only count too: past the iterations that are timed."""

from __future__ import annotations

import torch
from support.expectations import raises
from support.native_twins import Net, seeded
from support.processes import in_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import psengine
from psengine.tracing.backward_timer import ALWAYS_SAMPLED_ITERATIONS


class Towers(nn.Module):
    """Two towers, whose losses may be summed or taken apart; the first may drop a gradient, the second run twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.dropped = nn.Parameter(torch.ones(3))

    def forward(self, x, drops=False, reuses=False):
        first, second = self.first(x), self.second(x)
        if reuses:
            second = checkpoint(self.second, checkpoint(self.second, first, use_reentrant=True), use_reentrant=True)
        return (DropSecond.apply(first, self.dropped) if drops else first * self.dropped), second


class DropSecond(torch.autograd.Function):
    """Leaves the gradient of its second argument undefined."""

    @staticmethod
    def forward(ctx, x, dropped):
        return x * dropped

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def train(model, batch, steps=ALWAYS_SAMPLED_ITERATIONS + 2):
    """Train until hooks only count."""
    for _ in range(steps):
        model.zero_grad()
        sum(output.sum() for output in model(batch)).backward()


@in_ranks(2)
def test_a_gradient_that_comes_twice_is_an_error_later_too(rank, world_size):
    batch = torch.ones(2, 3)
    for options, text in (({}, "mark a variable ready only once"), ({"static_graph": True}, "graph has changed")):
        ddp = psengine.DistributedDataParallel(seeded(Towers), **options)
        train(ddp, batch)
        with raises(RuntimeError, text, "second."):
            sum(output.sum() for output in ddp(batch, reuses=True)).backward()


@in_ranks(1)
def test_a_single_replica_packs_nothing_for_views_either(rank, world_size):
    ddp = psengine.DistributedDataParallel(seeded(Net), gradient_as_bucket_view=True)
    for _ in range(ALWAYS_SAMPLED_ITERATIONS + 2):
        ddp.zero_grad()
        ddp(torch.ones(1, 4), use_spare=True).sum().backward()
        buckets = {bucket.flat.untyped_storage().data_ptr() for bucket in ddp.reducer.buckets}
        assert buckets.isdisjoint(p.grad.untyped_storage().data_ptr() for p in ddp.parameters())
