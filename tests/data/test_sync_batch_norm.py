"""Batch normalisation over ranks equals torch's BatchNorm in one process on the batches of all ranks together."""

import copy
import pickle
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.counting_collective import note_calls
from support.expectations import raises
from support.processes import in_ranks, run_ranks
from torch import nn

from psengine.data.sync_batch_norm import SyncBatchNorm, adopt_sync_batchnorm, convert_sync_batchnorm

CHANNELS = 3
SHAPES = {2: (), 3: (5,), 4: (4, 2), 5: (2, 3, 2)}
PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def batches_of_ranks(sizes: list[int], dimensions: int, dtype: torch.dtype, seed: int, offset: float):
    """Inputs and output gradients of every rank; ranks have different means and deviations, so local is not global."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for rank, size in enumerate(sizes):
        shape = (size, CHANNELS, *SHAPES[dimensions])
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * (1 + rank) + 2 * rank + offset
        dy = torch.randn(shape, generator=generator, dtype=torch.float64)
        result.append((x.to(dtype), dy.to(dtype)))
    return result


def layer_pair(dimensions: int, dtype: torch.dtype, options: dict[str, Any]):
    """Ours and the oracle, with the same weights and running statistics that are not the initial ones."""
    plain = PLAIN[dimensions](CHANNELS, **options).to(dtype)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in plain.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    ours = SyncBatchNorm(CHANNELS, **options).to(dtype)
    ours.load_state_dict(plain.state_dict())
    return ours, plain


def check(
    rank: int,
    sizes: list[int],
    dimensions: int = 4,
    dtype: torch.dtype = torch.float32,
    parameter_dtype: torch.dtype | None = None,
    frozen: tuple[str, ...] = (),
    input_needs_gradient: bool = True,
    offset: float = 1.0,
    steps: int = 2,
    tolerance: float = 1e-5,
    **options: Any,
) -> None:
    ours, plain = layer_pair(dimensions, parameter_dtype or dtype, options)
    # The oracle computes low precisions in float32: its own low-precision kernels round partial results.
    compute = torch.promote_types(dtype, torch.float32)
    plain = plain.to(compute)
    start, stop = sum(sizes[:rank]), sum(sizes[: rank + 1])
    for name in frozen:
        getattr(ours, name).requires_grad_(False)
    for step in range(steps):
        batches = batches_of_ranks(sizes, dimensions, dtype, step, offset)
        x, dy = (t.clone() for t in batches[rank])
        whole_x = torch.cat([b[0] for b in batches]).to(compute).requires_grad_(True)
        whole_dy = torch.cat([b[1] for b in batches]).to(compute)
        x.requires_grad_(input_needs_gradient)
        before = x.detach().clone()
        for layer in (ours, plain):
            layer.zero_grad()
        y, whole_y = ours(x), plain(whole_x)
        assert y.dtype == dtype
        assert y.stride() == x.stride()

        def close(got, expected):
            got, expected = got.detach(), expected.detach()
            # Statistics are merged in another order than one batch's are summed; a unit or two in the last place of
            # sums over the batch. Half precisions round results once more.
            rounding = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(got.dtype, tolerance)
            scale = float(expected.abs().max()) if expected.numel() else 1.0
            torch.testing.assert_close(
                got.to(compute), expected.to(compute), rtol=rounding, atol=rounding * max(scale, 1.0)
            )

        close(y, whole_y[start:stop])
        for name in ("running_mean", "running_var"):
            if ours.track_running_stats:
                close(getattr(ours, name), getattr(plain, name))
        if ours.track_running_stats:
            assert ours.num_batches_tracked == plain.num_batches_tracked
        if not y.requires_grad:
            continue
        y.backward(dy)
        whole_y.backward(whole_dy)
        assert torch.equal(x.detach(), before)
        if input_needs_gradient:
            assert x.grad.dtype == dtype
            close(x.grad, whole_x.grad[start:stop])
        for name, parameter in ours.named_parameters():
            if name in frozen:
                assert parameter.grad is None
                continue
            # Local sums: theirs added up are the whole batch's.
            total = parameter.grad.to(torch.float64, copy=True)
            dist.all_reduce(total)
            close(total.to(parameter.dtype), getattr(plain, name).grad)
        if ours.affine and "bias" not in frozen:
            axes = [d for d in range(dimensions) if d != 1]
            close(ours.bias.grad, batches[rank][1].to(compute).sum(axes))


def equals_one_big_batch(rank: int, world_size: int) -> None:
    warnings.simplefilter("error")
    uneven, with_empty = [3, 1, 5], [4, 0, 2]
    for dimensions in SHAPES:
        check(rank, uneven, dimensions)
    check(rank, [1, 1, 1], 2)
    check(rank, uneven, dtype=torch.bfloat16, parameter_dtype=torch.float32)
    check(rank, uneven, frozen=("weight",))
    check(rank, uneven, frozen=("bias",), input_needs_gradient=False)
    check(rank, with_empty, dtype=torch.float64, tolerance=1e-13)
    check(rank, with_empty, momentum=None, steps=3)
    check(rank, with_empty, affine=False, track_running_stats=False)
    check(rank, with_empty, momentum=1.0, eps=0.1)


def without_gradients_and_communication(rank: int, world_size: int) -> None:
    warnings.simplefilter("error")
    ours, plain = layer_pair(4, torch.float32, {})
    batches = batches_of_ranks([3] * world_size, 4, torch.float32, 0, 0.0)
    whole = torch.cat([x for x, _ in batches])
    x = batches[rank][0]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = ours(x)
            torch.testing.assert_close(y, plain(whole)[3 * rank : 3 * rank + 3])
            torch.testing.assert_close(ours.running_var, plain.running_var)
    calls = note_calls()
    x.requires_grad_(True)
    ours(x).sum().backward()
    assert [name for name, _ in calls] == ["all_gather", "all_reduce", "all_reduce"]
    calls.clear()
    ours(x.detach()).sum().backward()
    assert [name for name, _ in calls] == ["all_gather", "all_reduce"]
    calls.clear()
    for layer in (ours, plain):
        layer.load_state_dict(plain.state_dict())
        layer.eval()
    # Ranks evaluate on their own, as many batches as each has.
    for _ in range(rank):
        assert torch.equal(ours(x), plain(x))
    assert calls == []


def large_means(rank: int, world_size: int) -> None:
    # |mean| = 1000 deviations: E[x²] - E[x]² in float32 would keep no digit. Inputs are exact in both dtypes.
    batches = batches_of_ranks([64] * world_size, 2, torch.float32, 0, 1000.0)
    whole = torch.cat([x for x, _ in batches]).double()
    layer = SyncBatchNorm(CHANNELS, momentum=1.0)
    layer(batches[rank][0])
    torch.testing.assert_close(layer.running_var, whole.var(0).float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(layer.running_mean, whole.mean(0).float(), rtol=1e-7, atol=0)
    # The gradient subtracts the mean from the input before it scales either.
    check(rank, [16] * world_size, 2, offset=1000.0, tolerance=2e-3)


def refusals(rank: int, world_size: int) -> None:
    layer = SyncBatchNorm(CHANNELS)
    one_value = torch.zeros(1 if rank == 0 else 0, CHANNELS)
    with raises(ValueError, "Expected more than 1 value per channel when training, got input size"):
        layer(one_value)
    with raises(ValueError, "normalises 3 channels", "[4, 5]"):
        layer(torch.zeros(4, 5))
    with raises(TypeError, "floating-point", "torch.int64"):
        layer(torch.zeros(4, 3, dtype=torch.int64))
    # All ranks empty: nothing to learn from, as in torch's BatchNorm, and nothing broken.
    fresh, plain = SyncBatchNorm(CHANNELS), nn.BatchNorm2d(CHANNELS)
    empty = torch.zeros(0, CHANNELS, 2, 2, requires_grad=True)
    y = fresh(empty)
    assert y.shape == plain(empty).shape
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, fresh.state_dict()[name])
    y.sum().backward()
    assert torch.equal(fresh.weight.grad, torch.zeros(CHANNELS))


@in_ranks(3)
def test_process_groups(rank, world_size):
    pair, alone = dist.new_group([0, 1]), dist.new_group([2])
    mine = pair if rank < 2 else alone
    batches = [torch.randn(4, CHANNELS, generator=torch.Generator().manual_seed(r)) + r for r in range(3)]
    x, together = batches[rank], torch.cat(batches[:2] if rank < 2 else batches[2:])
    expected = nn.BatchNorm1d(CHANNELS)(together)[4 * rank : 4 * rank + 4] if rank < 2 else nn.BatchNorm1d(CHANNELS)(x)
    adopted = nn.SyncBatchNorm(CHANNELS, process_group=mine)
    adopt_sync_batchnorm(adopted)
    converted = convert_sync_batchnorm(nn.BatchNorm1d(CHANNELS), mine)
    for layer in (SyncBatchNorm(CHANNELS, process_group=mine), converted, adopted):
        torch.testing.assert_close(layer(x), expected)


@in_ranks(2)
def test_compiled_model(rank, world_size):
    torch.manual_seed(0)
    model = convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2)))
    reference = copy.deepcopy(model)
    fast = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        x = torch.randn(5, 4) + rank
        for m in (fast, reference):
            m(x).square().sum().backward()
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)
    torch.testing.assert_close(model[1].running_var, reference[1].running_var)


@pytest.mark.parametrize("function", [equals_one_big_batch, without_gradients_and_communication, large_means, refusals])
def test_across_ranks(function):
    run_ranks(function, 3)


def test_without_a_process_group_it_is_plain_batch_normalisation():
    ours, plain = layer_pair(4, torch.float32, {})
    x = torch.randn(3, CHANNELS, 2, 2)
    for training in (True, False):
        assert torch.equal(ours.train(training)(x), plain.train(training)(x))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name])


def test_conversion_changes_the_class_of_layers():
    group = object()
    plain, shared, own = nn.BatchNorm1d(3, eps=0.1), nn.BatchNorm2d(3), nn.SyncBatchNorm(3, process_group=group)
    model = nn.ModuleDict({"plain": plain, "a": shared, "b": nn.Sequential(shared, own), "other": nn.Linear(3, 3)})
    state = model.state_dict()
    assert convert_sync_batchnorm(model) is model
    assert [type(layer) for layer in (plain, shared, own, model["other"])] == [SyncBatchNorm] * 3 + [nn.Linear]
    assert (plain.eps, plain.process_group, own.process_group) == (0.1, None, group)
    assert list(model.state_dict()) == list(state)
    assert type(pickle.loads(pickle.dumps(shared))) is type(copy.deepcopy(shared)) is SyncBatchNorm

    class Special(nn.SyncBatchNorm):
        pass

    layers = [nn.SyncBatchNorm(3, process_group=group), Special(3), nn.BatchNorm1d(3)]
    adopt_sync_batchnorm(nn.Sequential(*layers))
    assert [type(layer) for layer in layers] == [SyncBatchNorm, Special, nn.BatchNorm1d]


def test_accelerators_get_torchs_layer():
    # No accelerator here: torch's forward is asked for whatever does not lie in host memory.
    with mock.patch.object(nn.SyncBatchNorm, "forward", return_value="torch's") as forward:
        x = torch.zeros(2, 3, device="meta")
        assert SyncBatchNorm(3)(x) == "torch's"
    forward.assert_called_once_with(x)
