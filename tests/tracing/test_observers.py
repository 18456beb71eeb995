"""What watches a step never fails it: times, timelines, stalls, norms and what is reported, whatever a program does."""

import contextlib
import shutil

import torch
from support.native_twins import assert_same_gradients, pair
from support.processes import in_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import psengine


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


@in_ranks(2)
def test_a_forward_that_was_interrupted_fails_no_later_step(rank, world_size, tmp_path):
    programs = (_bad_batch_after, _checkpointed)
    for options in ({}, {"find_unused_parameters": True}):
        ours, native = pair(Choosy, **options)
        ours._set_ddp_runtime_logging_sample_rate(3)
        with psengine.timeline(str(tmp_path / "timeline.json")):
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


@in_ranks(2)
def test_a_timeline_that_cannot_be_written_ends_no_training(rank, world_size, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = psengine.DistributedDataParallel(nn.Linear(4, 4))
    with psengine.timeline(str(folder / "timeline.json")):
        model(torch.ones(1, 4)).sum().backward()
        if rank == 0:
            shutil.rmtree(folder)
