"""SyncAllReduce(compress=...): what travels is encoded, what the optimizer sees is not."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import in_ranks
from support.top_one_codec import TopOne
from torch import nn

import psengine
from psengine.errors import NonFiniteGradientError


class Products(nn.Module):
    """Parameters whose gradients are ``factors``."""

    def __init__(self, values: list[torch.Tensor], factors: list[Any]) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(value) for value in values])
        self.factors = factors

    def forward(self) -> torch.Tensor:
        return sum((p * f).sum() for p, f in zip(self.values, self.factors, strict=True))


class HalfSlices(psengine.Codec):
    """Values in float16, cut anywhere: a payload that is not of bytes."""

    name = "half-slices"
    slice_numel = 1

    def payload_spec(self, numel, dtype):
        return psengine.PayloadSpec(torch.float16, numel)

    def encode(self, values, payload, state=None):
        payload.copy_(values)

    def decode(self, payload, into):
        into.copy_(payload)


@in_ranks(2)
def test_slices_have_the_dtype_of_their_payload(rank, world_size):
    module = Products([torch.zeros(5)], [torch.arange(5) * (rank + 0.5)])
    model = psengine.DistributedDataParallel(module, strategy=psengine.SyncAllReduce(compress=HalfSlices()))
    model().backward()
    assert module.values[0].grad.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


@in_ranks(2)
def test_ranks_without_data_take_part_with_zeros(rank, world_size):
    module = Products([torch.zeros(4)], [torch.full((4,), rank + 1.0)])
    model = psengine.DistributedDataParallel(module, strategy="sync:compress=int8")
    with model.join():
        for _ in range(2 + rank):
            module.zero_grad()
            model().backward()
    if rank == 1:
        assert module.values[0].grad.tolist() == [1.0] * 4  # it alone, divided by the initial world size


@in_ranks(2)
def test_what_was_left_out_stays_in_another_group_of_ranks(rank, world_size):
    model = psengine.DistributedDataParallel(nn.Linear(4, 4), strategy=psengine.SyncAllReduce(compress=TopOne()))
    model(torch.ones(1, 4)).sum().backward()
    before = model.strategy.state_dict()
    assert any(residual.any() for residual in before.values())
    model._update_process_group(dist.new_group([0, 1]))
    after = model.strategy.state_dict()
    assert {name: residual.tolist() for name, residual in after.items()} == {
        name: residual.tolist() for name, residual in before.items()
    }


@in_ranks(2)
def test_what_a_gradient_that_is_not_used_brought_of_residuals_goes_with_the_next(rank, world_size):
    """One residual, and two."""
    for codec in (TopOne(), psengine.codecs.onebit.OneBit()):
        module = Products([torch.zeros(4)], [torch.tensor([1.0, 2.0, 3.0, 4.0])])
        strategy = psengine.SyncAllReduce(compress=codec)
        model = psengine.DistributedDataParallel(module, strategy=strategy, check_finite=True)
        model().backward()
        before = strategy.state_dict()["values.0"].tolist()
        assert any(before)
        assert not isinstance(codec, TopOne) or before == [0.5, 1.0, 1.5, 0.0]
        if rank == 1:
            module.factors[0] = torch.tensor([1.0, torch.nan, 3.0, 4.0])
        with pytest.raises(NonFiniteGradientError):
            model().backward()
        assert strategy.state_dict()["values.0"].tolist() == before


LOSSY = ["int8", "fp4", "onebit", "topk:ratio=0.1"]


@in_ranks(2)
def test_a_step_that_a_scaler_skips_leaves_all_residuals_as_they_were(rank, world_size):
    """An infinity in one of two buckets, in the third of five steps that a GradScaler scales."""
    for codec in LOSSY:
        torch.manual_seed(rank)
        module = Products([torch.zeros(30, 40), torch.zeros(30, 40)], [torch.randn(30, 40), torch.randn(30, 40)])
        specification = f"sync:compress={codec.replace(':', ',')}"
        model = psengine.DistributedDataParallel(module, strategy=specification, bucket_cap_mb=0.004)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for step in range(5):
            before = copy.deepcopy([model.strategy.state_dict(), *module.parameters()])
            module.factors[0][3, 5] = torch.inf if step == 3 and rank == 1 else 1.0
            optimizer.zero_grad()
            scaler.scale(model()).backward()
            scaler.step(optimizer)
            scaler.update()
            after = [model.strategy.state_dict(), *module.parameters()]
            assert all(residual.isfinite().all() for residual in after[0].values()), codec
            is_as_before = torch.equal(after[1], before[1])
            assert is_as_before == (step == 3), (codec, step)
            for name, residual in after[0].items():
                assert torch.equal(residual, before[0][name]) == is_as_before, (codec, step, name)


NUMEL = 2000  # more than a slice


@in_ranks(2)
def test_a_checkpoint_has_both_residuals(rank, world_size):
    """Four steps with a checkpoint between them: what did not arrive is left out at the end."""
    arrived, left_out = torch.zeros(NUMEL), None
    gradient = torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))
    for _ in range(2):
        module = Products([torch.zeros(NUMEL)], [gradient])
        model = psengine.DistributedDataParallel(module, strategy="sync:compress=onebit")
        if left_out is not None:
            model.strategy.load_state_dict({"values.0": left_out})
        for _ in range(2):
            module.zero_grad()
            model().backward()
            arrived += module.values[0].grad
        left_out = model.strategy.state_dict()["values.0"]
    assert torch.allclose(arrived + psengine.sum(left_out), 2 * psengine.sum(gradient), atol=1e-5)
