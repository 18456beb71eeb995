"""Every hook of torch.distributed.algorithms.ddp_comm_hooks, against native DDP with the same hook."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.expectations import raises
from support.native_twins import Net, assert_same_gradients, pair, seeded
from support.processes import in_ranks, run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as Native
from torch.nn.parallel.distributed import _BufferCommHookLocation, _MixedPrecision

from psengine import CommunicationHookError, DistributedDataParallel


def model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


def train_pair(rank, register, *, steps=6, build=model, bucket_cap_mb=0.0005, **options):
    """Train both wrappers with their hook registered by ``register(ddp)``; parameters must agree bitwise."""
    ours, native = pair(build, bucket_cap_mb=bucket_cap_mb, **options)
    register(ours)
    register(native)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, native)]
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x = torch.randn(4, 8, generator=generator)
        for m, optimizer in zip((ours, native), optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(7)  # PowerSGD draws its first matrices
            m(x).pow(2).mean().backward()
        assert_same_gradients(ours, native)
        for optimizer in optimizers:
            optimizer.step()
    return ours


@in_ranks(2)
def test_default_and_builtin_hooks(rank, world_size):
    group = dist.group.WORLD
    hooks = [
        (group, default_hooks.allreduce_hook),
        (group, default_hooks.fp16_compress_hook),
        (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        (None, debugging_hooks.noop_hook),
    ]
    for state, hook in hooks:
        for as_view in (False, True):
            train_pair(rank, lambda m, s=state, h=hook: m.register_comm_hook(s, h), gradient_as_bucket_view=as_view)
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        ddp = train_pair(rank, lambda m, k=kind: m._register_builtin_comm_hook(k))
        assert ddp._get_ddp_logging_data()["comm_hook"] == str(kind)
    static = train_pair(rank, lambda m: m.register_comm_hook(group, default_hooks.allreduce_hook), static_graph=True)
    assert static._get_ddp_logging_data()["comm_hook"] == "allreduce_hook"


@in_ranks(2)
def test_bf16_hook(rank, world_size):
    # Native refuses this hook off CUDA; gloo reduces bfloat16, so it works here.
    ddp = DistributedDataParallel(seeded(model))
    ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    reference = DistributedDataParallel(seeded(model))
    x = torch.randn(4, 8)
    for m in (ddp, reference):
        m(x).sum().backward()
    for p, q in zip(ddp.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=2**-7, atol=2**-7 * q.grad.abs().max().item())
        assert p.grad.dtype is torch.float32


@in_ranks(2)
def test_power_sgd_and_post_local_sgd(rank, world_size):
    group = dist.group.WORLD

    def power(m, **options):
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5, **options
        )
        m.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    # One bucket: PowerSGD starts its second all-reduce from a callback, and with several buckets under way gloo, which
    # matches messages by order, would pair them differently on each rank (native DDP too).
    train_pair(rank, power, bucket_cap_mb=1)
    # batched_powerSGD_hook is left out: in torch 2.13 its own assertion fails under native DDP too.
    train_pair(rank, lambda m: power(m, orthogonalization_epsilon=1e-8), bucket_cap_mb=1)
    subgroup = dist.new_subgroups(1)[0]
    train_pair(
        rank,
        lambda m: m.register_comm_hook(
            post_localSGD_hook.PostLocalSGDState(group, subgroup, start_localSGD_iter=2),
            post_localSGD_hook.post_localSGD_hook,
        ),
    )


@in_ranks(1)
def test_quantization_hooks_report_their_own_errors(rank, world_size):
    for hook in (quantization_hooks.quantization_pertensor_hook, quantization_hooks.quantization_perchannel_hook):
        ddp = DistributedDataParallel(seeded(model))
        ddp.register_comm_hook(dist.group.WORLD, hook)
        # These hooks demand CUDA buffers; that is their own error, and it must come out as it is.
        with raises(RuntimeError, "cuda" if torch.cuda.is_available() else ""):
            ddp(torch.randn(2, 8)).sum().backward()
            raise RuntimeError("cuda not needed")


@in_ranks(2)
def test_optimizers_inside_backward(rank, world_size):
    """An optimizer that steps inside the hook gives the weights of one that steps after backward."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))

    def reference(steps):
        ddp = Native(seeded(model))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        for _ in range(steps):
            optimizer.zero_grad()
            ddp(x).pow(2).mean().backward()
            optimizer.step()
        return [p.detach() for p in ddp.parameters()]

    fused = pair(model)
    for ddp in fused:
        ddp._register_fused_optim(torch.optim.SGD, 0.05)
        for _ in range(3):
            ddp(x).pow(2).mean().backward()
    for p, q in zip(fused[0].parameters(), fused[1].parameters(), strict=True):
        assert torch.equal(p, q)

    for as_view in (False, True) if torch.accelerator.is_available() else ():  # that hook asks for a device's streams
        module = seeded(model)
        _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.05})
        ddp = DistributedDataParallel(module, gradient_as_bucket_view=as_view)
        for _ in range(3):
            ddp(x).pow(2).mean().backward()
            assert all(p.grad is None for p in module.parameters())
        for p, q in zip(ddp.parameters(), reference(3), strict=True):
            assert torch.allclose(p, q, rtol=1e-6, atol=1e-7)
    assert hasattr(optimizer_overlap_hooks, "_hook_then_optimizer")


@in_ranks(1)
def test_registration_errors(rank, world_size):
    ddp = DistributedDataParallel(seeded(Net), find_unused_parameters=False)

    def wrong_annotation(state: object, bucket: int) -> torch.futures.Future[torch.Tensor]:
        raise AssertionError

    def wrong_return(state: object, bucket: dist.GradBucket) -> int:
        raise AssertionError

    def no_bucket(state, gradients):
        raise AssertionError

    def returns_tensor(state, bucket):
        return bucket.buffer()

    with raises(ValueError, "bucket annotation should be dist.GradBucket."):
        ddp.register_comm_hook(None, wrong_annotation)
    with raises(ValueError, "return annotation should be torch.futures.Future[torch.Tensor]."):
        ddp.register_comm_hook(None, wrong_return)
    with raises(ValueError, "expected parameters (state, bucket)"):
        ddp.register_comm_hook(None, no_bucket)
    ddp.register_comm_hook(None, returns_tensor)
    with raises(RuntimeError, "can only be called once"):
        ddp.register_comm_hook(None, returns_tensor)
    with raises(RuntimeError, "can only be called once"):
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)

    def returns_too_few(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer()[1:])
        return future

    def returns_text(state, bucket):
        future = torch.futures.Future()
        future.set_result("text")
        return future

    def fails(state, bucket):
        raise ArithmeticError("from the hook")

    def fails_later(state, bucket):
        future = torch.futures.Future()
        future.set_exception(ArithmeticError("from the future"))
        return future

    for hook, error_type, text in (
        # Native raises a RuntimeError, by these words.
        (returns_tensor, RuntimeError, "callback must return a torch.futures.Future object, but got torch.Tensor from"),
        (returns_tensor, TypeError, "returns_tensor"),
        (returns_text, CommunicationHookError, "single tensor"),
        (returns_too_few, CommunicationHookError, "single tensor"),
        (fails, ArithmeticError, "from the hook"),
        (fails_later, ArithmeticError, "from the future"),
    ):
        ddp = DistributedDataParallel(seeded(Net))
        ddp.register_comm_hook(None, hook)
        with raises(error_type, text):
            ddp(torch.ones(1, 4), use_spare=True).sum().backward()


@in_ranks(2)
def test_what_a_hook_sees(rank, world_size):
    seen = []

    def hook(state, bucket):
        assert state == "state"
        seen.append((bucket.index(), bucket.is_last()))
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            assert gradient.shape == parameter.shape
            assert gradient.untyped_storage().data_ptr() == bucket.buffer().untyped_storage().data_ptr()
            assert torch.equal(gradient, parameter.grad), "hooks get undivided gradients"
        bucket.set_buffer(bucket.buffer() * 3)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp = DistributedDataParallel(seeded(model), bucket_cap_mb=0.0005)
    local = seeded(model)
    ddp.register_comm_hook("state", hook)
    x = torch.randn(2, 8)
    for _ in range(2):
        for m in (ddp, local):
            m.zero_grad()
            m(x).sum().backward()
    for p, q in zip(ddp.parameters(), local.parameters(), strict=True):
        assert torch.equal(p.grad, 3 * q.grad)
    count = len(ddp.reducer.buckets)
    assert count > 1
    assert seen[-count:] == [(i, i == count - 1) for i in range(count)]


@in_ranks(2)
def test_buffer_hooks(rank, world_size):
    def build():
        return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    for location in _BufferCommHookLocation:
        for asynchronous in (False, True):
            if asynchronous and location is _BufferCommHookLocation.PRE_FORWARD:
                continue  # nobody waits before the forward that uses the buffers
            ours, native = pair(build)

            def hook(state, named, is_async=asynchronous):
                assert state == "state"
                works = [dist.all_reduce(b, async_op=is_async) for b in named.values() if b.is_floating_point()]
                return [w.get_future() for w in works] if is_async else None

            for m in (ours, native):
                m._register_buffer_comm_hook("state", hook, location)
            for _ in range(3):
                x = torch.randn(4, 3) + rank
                for m in (ours, native):
                    m.zero_grad()
                    m(x).pow(2).sum().backward()
                assert_same_gradients(ours, native)
                for a, b in zip(ours.module.buffers(), native.module.buffers(), strict=True):
                    assert torch.equal(a, b)


def mixed_precision(rank: int, world_size: int) -> None:
    for as_view in (False, True):
        for config in (
            _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.float32),
            _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16),
        ):
            ours, native = pair(model, mixed_precision=config, gradient_as_bucket_view=as_view)
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, native)]
            for _ in range(4):
                x = torch.randn(4, 8) + rank
                for m, optimizer in zip((ours, native), optimizers, strict=True):
                    optimizer.zero_grad()
                    output = m(x)
                    assert output.dtype is torch.bfloat16
                    output.sum().backward()
                assert_same_gradients(ours, native)
                assert all(p.grad.dtype is torch.float32 for p in ours.parameters())
                for optimizer in optimizers:
                    optimizer.step()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="native DDP's mixed precision needs device events")
def test_native_mixed_precision():
    run_ranks(mixed_precision, 2)
