"""What watches a step never fails it: times, timelines, stalls, norms and what is reported, whatever a program does."""

from __future__ import annotations

import contextlib
import json
import os
import shutil

import pytest
import torch
from support.native_twins import assert_same_gradients, pair
from support.processes import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import psengine

# ---- forwards that are interrupted -------------------------------------------------------------------------------


class Choosy(nn.Module):
    """Raises for a batch with NaN, half-way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x):
        y = self.layers[0](x)
        if y.isnan().any():
            raise ValueError("a bad batch")
        return self.layers[1:](y)


def _bad_batch_after(model, x):
    """A complete forward, one that raises and is caught, and the backward of the first."""
    output = model(x)
    with contextlib.suppress(ValueError):
        model(torch.full_like(x, torch.nan))
    output.square().sum().backward()


def _checkpointed(model, x):
    checkpoint(model, x.requires_grad_(), use_reentrant=False).square().sum().backward()


def interrupted_forwards(rank: int, world_size: int, path: str) -> None:
    programs = (_bad_batch_after, _checkpointed)
    for options in ({}, {"find_unused_parameters": True}):
        ours, native = pair(Choosy, **options)
        ours._set_ddp_runtime_logging_sample_rate(3)
        with psengine.timeline(path):
            # All of the first ten iterations are sampled, then every third: programs meet both kinds.
            for step in range(20):
                for program in programs:
                    for model in (ours, native):
                        torch.manual_seed(100 * rank + step)
                        model.zero_grad()
                        program(model, torch.randn(3, 4))
                    assert_same_gradients(ours, native)
        times = ours._get_ddp_logging_data()
        assert times["backward_compute_time_start"] >= times["forward_compute_time_start"] > 0


def test_a_forward_that_was_interrupted_fails_no_later_step(tmp_path):
    run_ranks(interrupted_forwards, 2, str(tmp_path / "timeline.json"))


# ---- timelines ---------------------------------------------------------------------------------------------------


class Unusual(nn.Module):
    """Takes a nested tensor, which has no shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return sum(self.layer(row).sum() for row in x.unbind())


def _train_unusual(steps: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = psengine.DistributedDataParallel(Unusual())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def unusual_inputs(rank: int, world_size: int, path: str) -> None:
    plain = _train_unusual(3)
    with psengine.timeline(path):
        watched = _train_unusual(3)
    assert all(map(torch.equal, plain, watched))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_timeline_of_a_model_that_it_cannot_look_into_has_the_rest(tmp_path):
    path = tmp_path / "timeline.json"
    run_ranks(unusual_inputs, 1, str(path))
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert "forward" in names


def folder_is_gone(rank: int, world_size: int, path: str) -> None:
    torch.manual_seed(0)
    model = psengine.DistributedDataParallel(nn.Linear(4, 4))
    with psengine.timeline(path):
        model(torch.ones(1, 4)).sum().backward()
        if rank == 0:
            shutil.rmtree(os.path.dirname(path))


def test_a_timeline_that_cannot_be_written_ends_no_training(tmp_path):
    (tmp_path / "runs").mkdir()
    run_ranks(folder_is_gone, 2, str(tmp_path / "runs" / "timeline.json"))
