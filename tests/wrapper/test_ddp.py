"""DistributedDataParallel's behaviour, against native DDP in the same ranks or against plain arithmetic."""

import copy
import gc
import os
import signal
import time
import weakref
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from support.expectations import raises
from support.native_twins import Net, assert_same_gradients, pair, seeded
from support.processes import in_ranks, run_ranks_to_any_end
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as Native
from torch.utils.checkpoint import checkpoint

import psengine
from psengine.tracing.backwards import ALWAYS_SAMPLED_ITERATIONS


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


@in_ranks(2)
def test_a_second_backward_exchanges_nothing_as_with_native_ddp(rank, world_size):
    ours, native = pair(Net)
    x = torch.ones(2, 4) * (rank + 1)

    def loss(ddp, scale):
        return ddp(x * scale, use_spare=True).pow(2).sum()

    for _ in range(2):
        for ddp in (ours, native):
            losses = loss(ddp, 1), loss(ddp, 2)
            for one in losses:
                one.backward()
        assert_same_gradients(ours, native)
    gradient = ours.module.body.weight.grad
    assert not all(torch.equal(gradient, other) for other in psengine.gather(gradient)), "nothing stayed local"


@in_ranks(1)
def test_constructor_errors(rank, world_size):
    layer, group = nn.Linear(2, 2), dist.new_group()
    delayed = {"delay_all_reduce_named_params": [("weight", layer.weight)], "param_to_hook_all_reduce": layer.bias}
    wrapped = psengine.DistributedDataParallel(nn.Linear(2, 2))
    for error, texts, module, options in (
        (RuntimeError, ("doesn't have any parameter",), nn.Module(), {}),
        (RuntimeError, ("wrapped already", "Wrap model.module"), wrapped, {}),
        (RuntimeError, ("wrapped already",), Native(nn.Linear(2, 2)), {}),
        (RuntimeError, ("wraps a torch.nn.Module (got int)",), 3, {}),
        (ValueError, ("can only be None or contain a single element", "[0, 1]"), layer, {"device_ids": [0, 1]}),
        (ValueError, ("device_ids and output_device arguments only work with",), layer, {"device_ids": [0]}),
        (ValueError, ("same type of devices",), nn.Sequential(layer, nn.Linear(2, 2, device="meta")), {}),
        (RuntimeError, ("Cannot specify both process_group and",), layer, {"process_group": group, "device_mesh": 1}),
        (ValueError, ("bucket caps",), layer, {"bucket_cap_mb": -3}),
        (ValueError, ("be set at the same time",), layer, {"param_to_hook_all_reduce": layer.bias}),
        (ValueError, ("no delay_all_reduce_named_params",), layer, {"check_finite": True, **delayed}),
        (RuntimeError, ("'weight' cannot be received into", "to_empty"), nn.Linear(2, 2, device="meta"), {}),
        (TypeError, ("process group this rank belongs to",), layer, {"process_group": object()}),
    ):
        with raises(error, *texts):
            psengine.DistributedDataParallel(module, **options)
    wrapped(torch.ones(1, 2)).sum().backward()
    with raises(RuntimeError, "should be called before training loop starts"):
        wrapped._set_static_graph()
    with raises(ValueError, "should be equal or greater than 1"):
        wrapped._set_ddp_runtime_logging_sample_rate(0)
    with raises(TypeError, "must be callable"):
        wrapped.register_comm_hook(None, 3)
    assert "must be callable" in wrapped._get_ddp_logging_data()["error"]


def test_no_process_group_says_what_to_call():
    with pytest.raises(RuntimeError, match=r"psengine\.init\(\)"):
        psengine.DistributedDataParallel(nn.Linear(2, 2))


def die_in_training(rank: int, world_size: int) -> tuple[str, tuple[int, ...]]:
    ddp = psengine.DistributedDataParallel(nn.Linear(4, 4))
    ddp.register_comm_hook(dist.group.WORLD, allreduce_hook)
    try:
        for step in range(100):
            output = ddp(torch.randn(3, 4))
            if rank == 1 and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            output.sum().backward()
    except psengine.PeerLostError as error:
        return str(error), error.ranks
    raise AssertionError("training went on without rank 1")


def test_a_dead_rank_is_named_where_a_hook_exchanges():
    started = time.monotonic()
    results = run_ranks_to_any_end(die_in_training, 3, group_timeout_s=30)
    assert time.monotonic() - started < 30
    for rank in (0, 2):
        assert results[rank].error is None, results[rank].error
        message, ranks = results[rank].value
        assert ranks == (1,)
        assert "Lost rank 1" in message
        assert "gradient bucket 0" in message


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


class Towers(nn.Module):
    """Two towers, of which the second may run twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, reuses=False):
        first, second = self.first(x), self.second(x)
        if reuses:
            second = checkpoint(self.second, checkpoint(self.second, first, use_reentrant=True), use_reentrant=True)
        return first + second


@in_ranks(2)
def test_a_gradient_that_comes_twice_is_an_error_later_too(rank, world_size):
    for options, text in (({}, "mark a variable ready only once"), ({"static_graph": True}, "graph has changed")):
        ddp = psengine.DistributedDataParallel(seeded(Towers), **options)
        for _ in range(ALWAYS_SAMPLED_ITERATIONS + 2):
            ddp(torch.ones(2, 3)).sum().backward()
        with raises(RuntimeError, text, "second."):
            ddp(torch.ones(2, 3), reuses=True).sum().backward()


def with_buffers():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


OURS_ONLY = {
    "unused, reduction skipped": (
        Net,
        {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": 1e-5},
    ),
    "static graph": (with_buffers, {"static_graph": True, "bucket_cap_mb": 1e-5}),
}


@pytest.mark.parametrize("case", OURS_ONLY)
@in_ranks(2)
def test_uneven_inputs_where_native_aborts(rank: int, world_size: int, case: str) -> None:
    build, options = OURS_ONLY[case]
    model = psengine.DistributedDataParallel(seeded(build), **options)
    with model.join():
        for _ in range(4 * rank):  # rank 0 has no batch at all
            model.zero_grad()
            model(torch.ones(4, 4)).pow(2).sum().backward()
    reference = seeded(build)
    (reference(torch.ones(4, 4)).pow(2).sum() / 2).backward()
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        expected, found = (torch.zeros_like(one) if one.grad is None else one.grad for one in (p, q))
        assert rank == 0 or torch.allclose(expected, found, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not rpc.is_available(), reason="this torch was built without RPC")
@in_ranks(1)
def test_a_forward_whose_gradients_would_stay_in_a_context_is_refused(rank, world_size, tmp_path):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/rpc")
    rpc.init_rpc("worker", rank=rank, world_size=world_size, rpc_backend_options=options)
    model = psengine.DistributedDataParallel(nn.Linear(2, 2))
    text = "expected a forward outside of torch.distributed.autograd contexts, got one inside"
    with dist.autograd.context(), raises(psengine.PSEngineError, text, "Fix: call the model outside of the context"):
        model(torch.ones(1, 2))
    rpc.shutdown()
