"""Uneven inputs: ranks with different numbers of batches, against native DDP's join."""

from __future__ import annotations

import pytest
import torch
from support.native_twins import seeded
from support.processes import run_ranks
from torch import nn

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


# Native aborts the process in these.
OURS_ONLY = {
    "unused, reduction skipped": (
        Optional,
        {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": 1e-5},
    ),
    "static graph": (with_buffers, {"static_graph": True, "bucket_cap_mb": 1e-5}),
}


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
