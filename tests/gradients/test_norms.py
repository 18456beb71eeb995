"""psengine.clip_grad_norm_ against torch's on the averaged gradients."""

from __future__ import annotations

import pytest
import torch
from support.processes import in_ranks, run_ranks
from torch import nn

import psengine


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 3), nn.Linear(3, 1))


def clip(rank: int, world_size: int, max_norm: float) -> list[float]:
    model, twin = (psengine.DistributedDataParallel(build()) for _ in range(2))
    generator = torch.Generator().manual_seed(rank)
    norms = []
    for scale in (1.0, 0.25, 3.0):
        x = torch.randn(8, 300, generator=generator)
        for m in (model, twin):
            m.zero_grad()
            m(x).square().sum().backward()
            for parameter in m.parameters():
                parameter.grad.data *= scale  # a write that torch does not count
        norm = psengine.clip_grad_norm_(model, max_norm)
        assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(twin.parameters(), max_norm))
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        norms.append(norm.item())
    return norms


@pytest.mark.parametrize("max_norm", [1e-3, 1e6])
def test_equals_torch(max_norm):
    results = run_ranks(clip, 2, max_norm)
    assert results[0] == results[1], "the norm has the same bits on every rank"


@in_ranks(2)
def test_other_norms_errors_and_modules(rank, world_size):
    model = psengine.DistributedDataParallel(build())
    assert psengine.clip_grad_norm_(model, 1.0) == 0.0, "no gradients yet"
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(2, 300)).sum().backward()
        expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], float("inf"))
        assert torch.equal(psengine.clip_grad_norm_(model, 1e9, norm_type=float("inf")), expected)
        model.module[0].weight.grad[0, 0] = float("nan")
        with pytest.raises(RuntimeError, match=r"check_finite=True names the parameter|non-finite"):
            psengine.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    plain = build()
    plain(torch.ones(2, 300)).sum().backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert torch.equal(psengine.clip_grad_norm_(plain, 1e9), expected), "a module that is not wrapped"


def test_parameters_in_the_place_of_the_model_are_refused_with_the_fix():
    with pytest.raises(psengine.ArgumentTypeError, match=r"got generator\).*clip_grad_norm_\(model, max_norm\)"):
        psengine.clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0)
