"""DistributedDataParallel's behaviour, against native DDP in the same ranks or against plain arithmetic."""

from __future__ import annotations

import copy
import gc
import io
import os
import signal
import time
import unittest
import weakref
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.expectations import raises
from support.native_twins import Net, assert_same_gradients, pair, seeded
from support.processes import in_ranks, run_ranks, run_ranks_to_any_end
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as Native
from torch.utils.checkpoint import checkpoint

import psengine


@in_ranks(2)
def test_native_reducer_and_logger_are_never_constructed(rank, world_size):
    with (
        mock.patch.object(dist, "Reducer", side_effect=AssertionError("native Reducer constructed")),
        mock.patch.object(dist, "Logger", side_effect=AssertionError("native Logger constructed")),
        mock.patch.object(Native, "__init__", side_effect=AssertionError("native constructor called")),
    ):
        ddp = psengine.DistributedDataParallel(seeded(Net), find_unused_parameters=True)
        assert isinstance(ddp, Native)
        for _ in range(3):
            ddp(torch.randn(2, 4)).sum().backward()
        ddp._get_ddp_logging_data()
        duplicate = copy.deepcopy(ddp)
        duplicate(torch.randn(2, 4)).sum().backward()


# ---- unused and undefined --------------------------------------------------------------------------------------


@in_ranks(2)
def test_an_unused_parameter_is_named(rank, world_size):
    ddp = psengine.DistributedDataParallel(seeded(Net))
    ddp(torch.randn(2, 4)).sum().backward()
    texts = (
        "Expected to have finished reduction in the prior iteration before starting a new one",
        "find_unused_parameters=True",
        f"did not receive grad for rank {rank}: spare.weight, spare.bias",
        f"Parameter indices which did not receive grad for rank {rank}: 2 3",
    )
    with raises(RuntimeError, *texts):
        ddp(torch.randn(2, 4))
    with raises(RuntimeError, "spare.weight"):
        ddp._check_reducer_finalized()


def skipped_buckets(rank: int, world_size: int) -> tuple[int, int]:
    found = []
    for skip in (False, True):
        ddp = psengine.DistributedDataParallel(
            seeded(Net), find_unused_parameters=True, skip_all_reduce_unused_params=skip, bucket_cap_mb=1e-5
        )
        for step in range(3):
            ddp(torch.randn(2, 4), use_spare=step == 1).sum().backward()
        found.append(ddp._get_ddp_logging_data()["num_buckets_reduced"])
    return tuple(found)


def test_buckets_nobody_uses_can_be_skipped():
    assert run_ranks(skipped_buckets, 2) == [(4, 2), (4, 2)]


@in_ranks(2)
def test_reentrant_checkpointing_needs_a_static_graph(rank, world_size):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layer = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            x = self.first(x)
            return checkpoint(self.layer, checkpoint(self.layer, x, use_reentrant=True), use_reentrant=True)

    ddp = psengine.DistributedDataParallel(Twice())
    with raises(RuntimeError, "Expected to mark a variable ready only once", "with name layer.", "static_graph=True"):
        ddp(torch.ones(2, 3)).sum().backward()


def undefined_gradients(rank: int, world_size: int) -> None:
    """A gradient that autograd leaves undefined still makes its parameter ready."""

    class Drop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient, None

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept, self.dropped = nn.Linear(2, 2), nn.Parameter(torch.ones(2))

        def forward(self, x):
            return Drop.apply(self.kept(x), self.dropped)

    ours, native = pair(Model)
    for _ in range(3):
        for model in (ours, native):
            model.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
        assert_same_gradients(ours, native)


@pytest.mark.parametrize("world_size", [1, 2])
def test_undefined_gradients(world_size):
    run_ranks(undefined_gradients, world_size)


# ---- kinds of parameters and gradients -------------------------------------------------------------------------


@in_ranks(2)
def test_complex_parameters_are_averaged_whole(rank, world_size):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))
            self.real = nn.Parameter(torch.randn(3))

        def forward(self, x):
            return (x.to(torch.complex64) @ self.weight).abs().sum() + (self.real * x).sum()

    for as_view in (False, True):
        model = seeded(Model)
        reference = copy.deepcopy(model)
        ddp = psengine.DistributedDataParallel(model, gradient_as_bucket_view=as_view)
        batches = [torch.randn(4, 3, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
        ddp(batches[rank]).backward()
        (sum(reference(b) for b in batches) / world_size).backward()
        for p, q in zip(ddp.parameters(), reference.parameters(), strict=True):
            # Rounding of the sum over ranks only; the bug of native DDP is an error of order one.
            assert torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-6)
        assert model.weight.grad.imag.abs().max() > 0.1


@in_ranks(2)
def test_a_second_backward_that_exchanges_nothing_is_pointed_out(rank, world_size):
    ours, native = pair(Net)
    x = torch.ones(2, 4) * (rank + 1)

    def loss(ddp, scale):
        return ddp(x * scale, use_spare=True).pow(2).sum()

    with unittest.TestCase().assertNoLogs("psengine.gradients.reducer", "WARNING"):
        for _ in range(2):
            loss(ours, 1)  # as in a validation without no_grad()
            with torch.no_grad():
                loss(ours, 1)
            loss(ours, 1).backward()
        with ours.no_sync():
            loss(ours, 1).backward()
        (loss(ours, 1) + loss(ours, 2)).backward()
    ours.zero_grad()
    with unittest.TestCase().assertLogs("psengine.gradients.reducer", "WARNING") as caught:
        for _ in range(2):
            for ddp in (ours, native):
                losses = loss(ddp, 1), loss(ddp, 2)
                for one in losses:
                    one.backward()
            assert_same_gradients(ours, native)
    (said,) = caught.output
    assert "called twice before its first backward" in said
    gradient = ours.module.body.weight.grad
    assert not all(torch.equal(gradient, other) for other in psengine.gather(gradient)), "nothing stayed local"


@in_ranks(2)
def test_gradient_as_bucket_view(rank, world_size):
    ddp = psengine.DistributedDataParallel(seeded(Net), gradient_as_bucket_view=True)
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.randn(1, 4), use_spare=True).sum().backward()
        storages = {p.grad.untyped_storage().data_ptr() for p in ddp.parameters()}
        assert storages == {b.flat.untyped_storage().data_ptr() for b in ddp.reducer.buckets}
    plain = psengine.DistributedDataParallel(seeded(Net))
    plain(torch.randn(1, 4), use_spare=True).sum().backward()
    held = plain.module.body.weight.grad
    value = held.clone()
    plain.zero_grad()
    plain(torch.randn(1, 4), use_spare=True).sum().backward()
    assert torch.equal(held, value), "without views, a gradient somebody kept is never overwritten"


# ---- buffers ---------------------------------------------------------------------------------------------------


def buffers(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for sync in (True, False):
        model = nn.BatchNorm1d(2)
        model.register_buffer("flag", torch.tensor([rank == 0]))
        model.register_buffer("wide", torch.full((3,), complex(rank, 1)))
        ddp = psengine.DistributedDataParallel(model, forward_sync_buffers=sync)
        assert ddp.broadcast_buffers is sync
        for step in range(2):
            model.flag = torch.tensor([rank == 0, step == 1])  # reassigned, and changed in shape
            ddp(torch.randn(8, 2) + rank)
        with torch.no_grad():
            ddp.eval()
            ddp(torch.randn(1, 2))
        found[sync] = {k: v.clone() for k, v in model.state_dict().items()}
    return found


def test_buffers_follow_rank_0_when_asked():
    first, second = run_ranks(buffers, 2)
    assert torch.equal(first[True]["flag"], second[True]["flag"])
    assert torch.equal(first[True]["wide"], second[True]["wide"])
    assert not torch.equal(first[False]["running_mean"], second[False]["running_mean"])


# ---- errors ----------------------------------------------------------------------------------------------------


@in_ranks(1)
def test_constructor_errors(rank, world_size):
    wrap = psengine.DistributedDataParallel
    frozen = nn.Linear(2, 2).requires_grad_(False)
    group = dist.new_group()
    with raises(RuntimeError, "doesn't have any parameter that requires a gradient"):
        wrap(frozen)
    with raises(RuntimeError, "doesn't have any parameter"):
        wrap(nn.Module())
    with raises(RuntimeError, "wrapped already", "Wrap model.module"):
        wrap(wrap(nn.Linear(2, 2)))
    with raises(RuntimeError, "wrapped already"):
        wrap(Native(nn.Linear(2, 2)))
    with raises(RuntimeError, "wraps a torch.nn.Module (got int)"):
        wrap(3)
    with raises(ValueError, "can only be None or contain a single element", "[0, 1]"):
        wrap(nn.Linear(2, 2), device_ids=[0, 1])
    with raises(ValueError, "device_ids and output_device arguments only work with"):
        wrap(nn.Linear(2, 2), device_ids=[0])
    with raises(ValueError, "same type of devices"):
        wrap(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))
    with raises(RuntimeError, "uninitialized parameters"):
        wrap(nn.LazyLinear(2))
    with raises(RuntimeError, "Cannot specify both process_group and device_mesh"):
        wrap(nn.Linear(2, 2), process_group=group, device_mesh=object())
    with raises(ValueError, "unknown strategy", "got 'gossip'"):
        wrap(nn.Linear(2, 2), strategy="gossip")
    with raises(ValueError, "unknown collective"):
        wrap(nn.Linear(2, 2), collective="pigeon")
    with raises(ValueError, "bucket caps"):
        wrap(nn.Linear(2, 2), bucket_cap_mb=-3)
    layer = nn.Linear(2, 2)
    with raises(ValueError, "need to be set at the same time"):
        wrap(layer, delay_all_reduce_named_params=[("weight", layer.weight)])
    delayed = {"delay_all_reduce_named_params": [("weight", layer.weight)], "param_to_hook_all_reduce": layer.bias}
    with raises(ValueError, "check_finite=True looks at buckets", "got ['weight']"):
        wrap(layer, check_finite=True, **delayed)
    ddp = wrap(nn.Linear(2, 2))
    ddp(torch.ones(1, 2)).sum().backward()
    with raises(RuntimeError, "should be called before training loop starts"):
        ddp._set_static_graph()
    with raises(ValueError, "should be equal or greater than 1", "got 0"):
        ddp._set_ddp_runtime_logging_sample_rate(0)
    for error_type in (TypeError, psengine.PSEngineError):
        with raises(error_type, "must be callable"):
            ddp.register_comm_hook(None, 3)
    assert "must be callable" in ddp._get_ddp_logging_data()["error"]


def test_no_process_group_says_what_to_call():
    with pytest.raises(RuntimeError, match=r"psengine\.init\(\)"):
        psengine.DistributedDataParallel(nn.Linear(2, 2))


def die_in_training(rank: int, world_size: int, moment: str) -> tuple[str, tuple[int, ...]]:
    ddp = psengine.DistributedDataParallel(
        seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)))
    )
    if moment == "before a hook":
        ddp.register_comm_hook(dist.group.WORLD, allreduce_hook)
    try:
        for step in range(100):
            output = ddp(torch.randn(3, 4))
            if rank == 1 and step == 5 and moment != "before forward":
                os.kill(os.getpid(), signal.SIGKILL)
            output.sum().backward()
            if rank == 1 and step == 5 and moment == "before forward":
                os.kill(os.getpid(), signal.SIGKILL)
    except psengine.PeerLostError as error:
        return str(error), error.ranks
    raise AssertionError("training went on without rank 1")


@pytest.mark.parametrize("moment", ["before forward", "before backward", "before a hook"])
def test_a_dead_rank_is_named(moment):
    started = time.monotonic()
    results = run_ranks_to_any_end(die_in_training, 3, moment, group_timeout_s=30)
    assert time.monotonic() - started < 30
    for rank in (0, 2):
        assert results[rank].error is None, results[rank].error
        message, ranks = results[rank].value
        assert ranks == (1,)
        assert "Lost rank 1" in message
        # Rank 0 only sends buffers, so it may notice in the backward after.
        assert "gradient bucket 0" in message or moment == "before forward"


# ---- copies, names, cycles -------------------------------------------------------------------------------------


@in_ranks(2)
def test_pickle_and_deepcopy(rank, world_size):
    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
        ddp = psengine.DistributedDataParallel(seeded(Net), **options)
        buffer = io.BytesIO()
        torch.save(ddp, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        for other in (copy.deepcopy(ddp), loaded):
            x = torch.randn(2, 4)
            for _ in range(3):
                for model in (ddp, other):
                    model.zero_grad()
                    model(x, use_spare=True).sum().backward()
                assert_same_gradients(other, ddp)
    grouped = psengine.DistributedDataParallel(seeded(Net), process_group=dist.new_group())
    with raises(
        RuntimeError, "DDP Pickling/Unpickling are only supported when using DDP with the default process group"
    ):
        copy.deepcopy(grouped)


@in_ranks(2)
def test_a_dropped_wrapper_lets_go(rank, world_size):
    module = seeded(Net)
    ddp = psengine.DistributedDataParallel(module)
    ddp(torch.randn(1, 4), use_spare=True).sum().backward()
    reducer, bucket = weakref.ref(ddp.reducer), weakref.ref(ddp.reducer.buckets[0])
    del ddp
    gc.collect()
    assert reducer() is None, "the hooks must not keep a dropped wrapper's buckets"
    assert bucket() is None
    again = psengine.DistributedDataParallel(module)
    for _ in range(2):
        again.zero_grad()
        again(torch.ones(1, 4) * (rank + 1), use_spare=True).sum().backward()
    again._remove_autograd_hooks()
    module.zero_grad()
    again(torch.ones(1, 4) * (rank + 1), use_spare=True).sum().backward()
    gathered = [torch.empty(4, 4) for _ in range(world_size)]
    dist.all_gather(gathered, module.body.weight.grad)
    assert not torch.equal(*gathered), "without hooks gradients stay local"


@in_ranks(2)
def test_create_graph_warns(rank, world_size):
    ddp = psengine.DistributedDataParallel(seeded(Net))
    with unittest.TestCase().assertLogs("psengine", "WARNING") as caught:
        ddp(torch.ones(1, 4) * rank, use_spare=True).pow(2).sum().backward(create_graph=True)
    assert "create_graph=True is not well-supported" in caught.output[0]
    ddp.zero_grad()


@in_ranks(3)
def test_update_process_group(rank, world_size):
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    ddp = psengine.DistributedDataParallel(model)
    ddp(torch.full((1, 1), float(rank))).sum().backward()
    group = dist.new_group([0, 2])
    ddp._update_process_group(group)
    for _ in range(2 if rank != 1 else 0):
        ddp.zero_grad()
        ddp(torch.full((1, 1), float(rank))).sum().backward()
    assert rank == 1 or model.weight.grad.item() == 1.0


@in_ranks(2)
def test_a_static_graph_with_unused_parameters_goes_on_in_another_group(rank, world_size):
    ours, native = pair(Net, static_graph=True)
    group = dist.new_group([0, 1])
    for step in range(4):
        if step == 2:
            ours._update_process_group(group)
        x = torch.randn(2, 4)
        for model in (ours, native):
            model.zero_grad()
            model(x, use_spare=False).sum().backward()
        assert_same_gradients(ours, native)


@in_ranks(2)
def test_static_graph_may_start_in_no_sync(rank, world_size):
    """Native DDP fails here (pytorch#143580); the oracle is a model without static_graph."""
    static = psengine.DistributedDataParallel(seeded(Net), static_graph=True)
    reference = Native(seeded(Net))
    for _ in range(4):
        batches = torch.randn(2, 2, 4)
        for model in (static, reference):
            model.zero_grad()
            with model.no_sync():
                model(batches[0], use_spare=True).sum().backward()
            model(batches[1], use_spare=True).sum().backward()
        assert_same_gradients(static, reference)


@in_ranks(2)
def test_a_bucket_that_only_no_sync_used_is_not_skipped(rank, world_size):
    # Native DDP's ranks drift apart.
    skipping = psengine.DistributedDataParallel(
        seeded(Net), find_unused_parameters=True, skip_all_reduce_unused_params=True, bucket_cap_mb=1e-5
    )
    with skipping.no_sync():
        skipping(torch.ones(1, 4) * (rank + 1), use_spare=True).sum().backward()
    skipping(torch.ones(1, 4)).sum().backward()
    gathered = [torch.empty(4, 4) for _ in range(world_size)]
    dist.all_gather(gathered, skipping.module.spare.weight.grad)
    assert torch.equal(*gathered)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Embedding(10, 4, sparse=True), nn.Embedding(10, 4, sparse=True)
        self.head = nn.Linear(4, 2)

    def forward(self, indices, use_b=True):
        x = self.a(indices)
        return self.head(x + self.b(indices) if use_b else x)


@in_ranks(2)
def test_sparse_corners(rank, world_size):
    """An embedding that one rank does not use, and two gradients that share their values."""
    indices = torch.arange(4) + rank
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        ddp, dense = psengine.DistributedDataParallel(seeded(Words), **options), seeded(Words)
        for _ in range(3):
            ddp.zero_grad()
            ddp(indices, use_b=rank == 0).sum().backward()
        for r in range(world_size):
            (dense(torch.arange(4) + r, use_b=r == 0).sum() / world_size).backward()
        for p, q in zip(ddp.parameters(), dense.parameters(), strict=True):
            assert torch.allclose(p.grad.to_dense(), q.grad.to_dense())


@in_ranks(2)
def test_a_first_forward_in_inference_mode(rank, world_size):
    ddp = psengine.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
    with torch.inference_mode():
        ddp.eval()(torch.randn(2, 4))
    for _ in range(2):
        ddp.train()(torch.randn(4, 4)).sum().backward()


@in_ranks(3)
def test_an_alias_of_a_view_is_divided_like_the_view(rank, world_size):
    # Three ranks: a quotient is not the product with the reciprocal.
    ours, native = pair(Net, gradient_as_bucket_view=True)
    for _ in range(3):
        x = torch.randn(2, 4)
        for model in (ours, native):
            for p in model.parameters():
                p.grad = None if p.grad is None else p.grad.detach()
            model(x, use_spare=True).sum().backward()
        assert_same_gradients(ours, native)


@in_ranks(2)
def test_a_static_graph_recovers_from_a_failed_first_backward(rank, world_size):
    ddp, native = psengine.DistributedDataParallel(seeded(Net), static_graph=True), Native(seeded(Net))

    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError("once")

    with raises(ArithmeticError, "once"):
        ddp(Fail.apply(torch.ones(1, 4, requires_grad=True)), use_spare=True).sum().backward()
    for _ in range(3):
        x = torch.randn(2, 4)
        for model in (ddp, native):
            model.zero_grad()
            model(x, use_spare=True).sum().backward()
        assert_same_gradients(ddp, native)


@in_ranks(2)
def test_buffers_are_verified_and_a_failed_strategy_can_be_used_again(rank, world_size):
    module = nn.Linear(2, 2)
    module.register_buffer("mask", torch.ones(4 + 2 * rank))
    with raises(RuntimeError, "buffers and frozen parameters[0] ('mask')", "[6]", "[4]", f"seen on rank {rank}"):
        psengine.DistributedDataParallel(module)
    for bad, text in (
        (torch.ones(1).expand(5), "'mask' is expanded"),
        (torch.ones(2).to_sparse(), "No support for sparse tensors"),
        (torch.ones(2, device="meta"), "meta device"),
    ):
        module.mask = bad
        with raises(RuntimeError, text):
            psengine.DistributedDataParallel(module)
    strategy = psengine.SyncAllReduce()
    with raises(RuntimeError, "appears not to match"):
        psengine.DistributedDataParallel(nn.Linear(2, 2 + rank), strategy=strategy)
    psengine.DistributedDataParallel(nn.Linear(2, 2), strategy=strategy)


@in_ranks(1)
def test_delayed_all_reduce_goes_with_its_wrapper(rank, world_size):
    module = seeded(Net)
    named = list(module.named_parameters())
    options = {"delay_all_reduce_named_params": named, "param_to_hook_all_reduce": module.body.weight}

    def wrap_and_drop():
        # Since Python 3.12 contextlib leaves a cycle of the error and this frame.
        ddp = psengine.DistributedDataParallel(module, **options)
        with raises(RuntimeError, "there is no bucket for a hook"):
            ddp.register_comm_hook(None, lambda state, bucket: None)

    for _ in range(2):
        wrap_and_drop()
    gc.collect()
    assert not module.body.weight._backward_hooks


@in_ranks(2)
def test_a_collective_object_and_deepcopy(rank, world_size):
    from psengine.collectives.c10d import C10dCollective

    ddp = psengine.DistributedDataParallel(seeded(Net), collective=C10dCollective())
    other = copy.deepcopy(ddp)
    for model in (ddp, other):
        model(torch.ones(1, 4) * rank, use_spare=True).sum().backward()
    assert_same_gradients(other, ddp)


@in_ranks(1)
def test_static_graph_refuses_outputs_it_cannot_watch(rank, world_size):
    @dataclass
    class Output:
        prediction: torch.Tensor

    class Model(nn.Linear):
        def forward(self, x):
            return Output(super().forward(x))

    ddp = psengine.DistributedDataParallel(Model(3, 3), static_graph=True)
    with raises(RuntimeError, "static_graph=True must see backward begin", "Output"):
        ddp(torch.ones(1, 3))
