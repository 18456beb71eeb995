"""What hooks must notice in every iteration holds where they only count too: past the iterations that are timed."""

from __future__ import annotations

import pytest
import torch
from support.expectations import raises
from support.native_twins import Net, assert_same_gradients, pair, seeded
from support.processes import in_ranks, run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import psengine
from psengine.tracing.backward_timer import ALWAYS_SAMPLED_ITERATIONS

OPTIONS = ({}, {"gradient_as_bucket_view": True}, {"static_graph": True})


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


def later_iterations(rank: int, world_size: int) -> None:
    """Compare ``ours`` with native DDP in iterations of many kinds after the first ones."""
    batch = torch.arange(6.0).view(2, 3) + rank

    def change(parameter):
        parameter.grad.mul_(rank + 3)

    for options in OPTIONS:
        ours, native = pair(Towers, **options)
        for model in (ours, native):
            train(model, batch)
        for kind in ("whole", "dropped", "towers apart", "no_sync", "kept gradients", "hooked", "whole"):
            for model in (ours, native):
                if kind != "kept gradients":
                    model.zero_grad()
                handle = None
                if kind == "no_sync":
                    with model.no_sync():
                        sum(output.sum() for output in model(2 * batch)).backward()
                if kind == "hooked":  # registered after the model's own hooks; what it does is exchanged
                    handle = model.module.dropped.register_post_accumulate_grad_hook(change)
                first, second = model(batch, drops=kind == "dropped")
                if kind == "towers apart":
                    first.sum().backward()
                    second.sum().backward()
                else:
                    (first.sum() + second.sum()).backward()
                if handle is not None:
                    handle.remove()
            assert_same_gradients(ours, native)
        assert ours.reducer.completed_steps == ALWAYS_SAMPLED_ITERATIONS + 2 + 7

        ours.zero_grad()
        ours(batch)[1].sum().backward()
        rule = "your training graph has changed" if "static_graph" in options else "not used in producing loss"
        with raises(RuntimeError, "Expected to have finished reduction in the prior iteration", rule, "first.weight"):
            ours(batch)


@pytest.mark.parametrize("world_size", [1, 2])
def test_later_iterations_are_native_ones(world_size):
    run_ranks(later_iterations, world_size)


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
