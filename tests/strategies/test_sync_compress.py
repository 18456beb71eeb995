"""SyncAllReduce(compress=...): what travels is encoded, what the optimizer sees is not."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracles.averages import SlicedAverage
from support.processes import in_ranks, run_ranks
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
        products = [(p * f).sum() for p, f in zip(self.values, self.factors, strict=True)]
        return sum((p.real if p.is_complex() else p).float() for p in products)


def averages(
    rank: int, world_size: int, codec: str, options: dict[str, Any], weight: float | None, numel: int
) -> list[torch.Tensor]:
    """One parameter, so that it is alone in its bucket before and after buckets are rebuilt; three steps."""
    generator = torch.Generator().manual_seed(rank)
    module = Products([torch.zeros(numel)], [torch.zeros(numel)])
    model = psengine.DistributedDataParallel(module, strategy=f"sync:compress={codec}", **options)
    results = []
    for _ in range(3):
        module.factors[0] = torch.randn(numel, generator=generator)
        model.batch_weight(weight if weight is None else weight * (rank + 1))
        module.zero_grad(set_to_none=not options.get("gradient_as_bucket_view"))
        model().backward()
        results += [module.factors[0].clone(), module.values[0].grad.clone()]
    return results


# Slices of 1,024 values, of 976 and of none.
NUMEL = 2000
# Two pieces with "int8", of which the second has slices of 2,560 values, of 2,560 and of 2,024.
OF_TWO_PIECES = 504 * 3 * 512 + 7144


@pytest.mark.parametrize(
    ("codec", "options", "weight", "numel"),
    [
        ("onebit", {"collective": "c10d"}, 2.0, NUMEL),
        ("int8", {"gradient_as_bucket_view": True}, None, NUMEL),
        ("int8", {}, None, OF_TWO_PIECES),
        ("int8", {"collective": "c10d"}, None, OF_TWO_PIECES),
    ],
    ids=str,
)
def test_averages_of_three_ranks_are_those_of_the_rule(codec, options, weight, numel):
    world_size = 3
    results = run_ranks(averages, world_size, codec, options, weight, numel)
    rule = SlicedAverage(codec, world_size)
    for step in range(3):
        if step == 1:
            rule.lay_out_anew()  # buckets are rebuilt
        divisors = [world_size if weight is None else 6 / (rank + 1) for rank in range(world_size)]
        given = [result[2 * step] for result in results]
        is_view = "gradient_as_bucket_view" in options
        shares = [g / d if is_view and step else g * (1.0 / d) for g, d in zip(given, divisors, strict=True)]
        expected = rule(shares)
        for result in results:
            average = result[2 * step + 1]
            assert torch.equal(average, results[0][2 * step + 1]), "replicas agree to the bit"
            # In a view a gradient may be divided in place, or copied and multiplied: one bit in the scale.
            assert torch.allclose(average, expected, rtol=0, atol=1e-6 if is_view else 0), step


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


class Shapes(nn.Module):
    """Whatever may be in a bucket; with a gradient that is not contiguous, and a sparse one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.none = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(0))
        self.wide = nn.Parameter(torch.randn(70, 3, dtype=torch.float64))
        self.narrow, self.brain = nn.Parameter(torch.randn(900).half()), nn.Parameter(torch.randn(40, 30).bfloat16())
        self.turned = nn.Parameter(torch.randn(50, 20).t())
        self.spiral = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.rows = nn.Embedding(30, 4, sparse=True)

    def forward(self, factor: float) -> torch.Tensor:
        found = sum((p.float() * factor).sum() for p in (self.one, self.none, self.wide, self.narrow, self.brain))
        turned = (self.turned.expand(2, 20, 50) * factor).sum() + (self.spiral.real * factor).sum()
        return found + turned + factor * self.rows(torch.tensor([3, 3, 7])).sum()


@pytest.mark.parametrize("options", [{"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
@in_ranks(2)
def test_buckets_of_every_shape_and_dtype(rank: int, world_size: int, options: dict[str, Any]) -> None:
    for codec in (*LOSSY, "bf16"):
        model = psengine.DistributedDataParallel(
            Shapes(), strategy=f"sync:compress={codec.replace(':', ',')}", bucket_cap_mb=0.002, **options
        )
        for _ in range(3):
            model.zero_grad()
            model(1.0 + rank).backward()
        for name, p in model.module.named_parameters():
            gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
            assert (gradient.dtype, gradient.shape) == (p.dtype, p.shape), (codec, name)
            whole = torch.view_as_real(gradient).contiguous() if gradient.is_complex() else gradient.contiguous()
            others = [torch.empty_like(whole) for _ in range(world_size)]
            torch.distributed.all_gather(others, whole.detach())
            assert torch.equal(others[0], others[1]), (codec, name)
            if codec in ("int8", "bf16") and name not in ("rows.weight", "spiral"):
                expected = torch.full_like(gradient, 3.0 if name == "turned" else 1.5)
                assert torch.allclose(gradient, expected, atol=0.05), (codec, name)
        assert model.module.rows.weight.grad.to_dense()[3].tolist() == [3.0] * 4, "sparse gradients are not encoded"
        assert model.module.spiral.grad.tolist() == [1.5] * 5, "nor are complex ones"


def resumed(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Four steps with a checkpoint between them; what arrived, and what is left out at the end."""
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
    return arrived, left_out


def test_a_checkpoint_has_both_residuals():
    results = run_ranks(resumed, 2)
    gradients = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    left_out = results[0][1] + results[1][1]
    assert torch.allclose(results[0][0] + left_out, 2 * sum(gradients), atol=1e-5)
