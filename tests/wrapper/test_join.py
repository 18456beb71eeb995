"""Uneven inputs: ranks with different numbers of batches, against native DDP's join."""

from __future__ import annotations

import functools

import pytest
import torch
from support.native_extension import SHARED_MEMORY
from support.native_twins import pair, seeded
from support.processes import run_ranks
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as Native

from psengine import DistributedDataParallel


def with_buffers():
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.never = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        y = self.a(x)
        return self.b(y) if x.sum() > 0 else y


CASES = {
    "plain": (with_buffers, {}),
    "small buckets": (with_buffers, {"bucket_cap_mb": 1e-5}),
    "views": (with_buffers, {"gradient_as_bucket_view": True}),
    "unused": (Optional, {"find_unused_parameters": True}),
}
# Native aborts the process in these.
OURS_ONLY = {
    "unused, reduction skipped": (
        Optional,
        {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": 1e-5},
    ),
    "static graph": (with_buffers, {"static_graph": True, "bucket_cap_mb": 1e-5}),
}


def uneven(rank: int, world_size: int, case: str, by_initial: bool, collective: str) -> list[torch.Tensor]:
    build, options = CASES[case]
    models = pair(build, **options, collective=collective)
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(rank)
        with model.join(divide_by_initial_world_size=by_initial):
            for step in range(4 + 3 * rank):
                optimizer.zero_grad()
                x = torch.randn(4, 3, generator=generator)
                if step % 3 == 1:
                    with model.no_sync():
                        model(x).pow(2).sum().backward()
                model(x).pow(2).sum().backward()
                optimizer.step()
    ours, native = models
    for p, q in zip(ours.state_dict().values(), native.state_dict().values(), strict=True):
        assert torch.equal(p, q)
    assert ours._get_ddp_logging_data()["join_uneven_inputs"]
    return [p.detach().clone() for p in ours.parameters()]


def several_joinables(rank: int, world_size: int, by_initial: bool, collective: str) -> None:
    """Only the first joinable counts the live ranks; the second is not told how many there are."""
    results = []
    for wrap in (functools.partial(DistributedDataParallel, collective=collective), Native):
        first, second = (wrap(seeded(with_buffers)) for _ in range(2))
        generator = torch.Generator().manual_seed(rank)
        with Join([first, second], divide_by_initial_world_size=by_initial):
            for _ in range(3 + 2 * rank):
                x = torch.randn(4, 3, generator=generator)
                for model in (first, second):
                    model.zero_grad()
                    model(x).pow(2).sum().backward()
        results.append([p.grad for model in (first, second) for p in model.parameters()])
    for ours, native in zip(*results, strict=True):
        assert torch.equal(ours, native)


@pytest.mark.parametrize("collective", ["c10d", SHARED_MEMORY])
def test_several_joinables_equal_native(collective):
    run_ranks(several_joinables, 2, False, collective)


@pytest.mark.parametrize(
    ("case", "by_initial"), [("plain", True), ("small buckets", False), ("views", True), ("unused", False)]
)
@pytest.mark.parametrize("collective", ["c10d", SHARED_MEMORY])
def test_uneven_inputs_equal_native(collective, case, by_initial):
    results = run_ranks(uneven, 3, case, by_initial, collective)
    for result in results[1:]:
        for p, q in zip(result, results[0], strict=True):
            assert torch.equal(p, q), "everybody ends with the last joiner's model"


def uneven_without_oracle(rank: int, world_size: int, case: str) -> list[torch.Tensor]:
    build, options = OURS_ONLY[case]
    model = DistributedDataParallel(seeded(build), **options)
    with model.join():
        for _ in range(4 * rank):  # rank 0 has no batch at all
            model.zero_grad()
            model(torch.ones(4, 3)).pow(2).sum().backward()
    return [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]


@pytest.mark.parametrize("case", OURS_ONLY)
def test_uneven_inputs_where_native_aborts(case):
    _, second = run_ranks(uneven_without_oracle, 2, case)
    build, _ = OURS_ONLY[case]
    reference = seeded(build)
    (reference(torch.ones(4, 3)).pow(2).sum() / 2).backward()
    for p, gradient in zip(reference.parameters(), second, strict=True):
        assert torch.allclose(torch.zeros_like(p) if p.grad is None else p.grad, gradient, rtol=1e-5, atol=1e-6)
