"""psengine.clip_grad_norm_ against torch's on the averaged gradients."""

from __future__ import annotations

import pytest
import torch
from support.processes import run_ranks
from torch import nn

import psengine


def clip(rank: int, world_size: int) -> list[float]:
    torch.manual_seed(0)
    ddp, twin = (psengine.DistributedDataParallel(nn.Linear(300, 200)) for _ in range(2))
    twin.load_state_dict(ddp.state_dict())
    norms = []
    for max_norm, norm_type in ((1e-3, 2.0), (1e6, float("inf"))):
        for model in (ddp, twin):
            model.zero_grad()
            model(torch.full((8, 300), 1.0 + rank)).square().sum().backward()
        norm = psengine.clip_grad_norm_(ddp, max_norm, norm_type)
        assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(twin.parameters(), max_norm, norm_type))
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(ddp.parameters(), twin.parameters(), strict=True))
        norms.append(norm.item())
    return norms


def test_equals_torch_and_each_other():
    first, second = run_ranks(clip, 2)
    assert first == second


def test_parameters_in_the_place_of_the_model_are_refused_with_the_fix():
    with pytest.raises(psengine.ArgumentTypeError, match=r"got generator\).*clip_grad_norm_\(model, max_norm\)"):
        psengine.clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0)
