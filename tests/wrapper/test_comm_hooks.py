"""Every hook of torch.distributed.algorithms.ddp_comm_hooks, against native DDP with the same hook."""

from __future__ import annotations

import torch
import torch.distributed as dist
from support.expectations import raises
from support.native_twins import Net, assert_same_gradients, pair, seeded
from support.processes import in_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
)

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


@in_ranks(1)
def test_registration_errors(rank, world_size):
    ddp = DistributedDataParallel(seeded(Net), find_unused_parameters=False)

    def wrong_annotation(state: object, bucket: int) -> torch.futures.Future[torch.Tensor]: ...

    def wrong_return(state: object, bucket: dist.GradBucket) -> int: ...

    def no_bucket(state, gradients): ...

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

    def future_of(result):
        future = torch.futures.Future()
        (future.set_exception if isinstance(result, Exception) else future.set_result)(result)
        return future

    def fails(state, bucket):
        raise ArithmeticError("from the hook")

    for hook, error_type, text in (
        # Native raises a RuntimeError, by these words.
        (returns_tensor, RuntimeError, "callback must return a torch.futures.Future object, but got torch.Tensor from"),
        (returns_tensor, TypeError, "returns_tensor"),
        (lambda state, bucket: future_of("text"), CommunicationHookError, "single tensor"),
        (lambda state, bucket: future_of(bucket.buffer()[1:]), CommunicationHookError, "single tensor"),
        (fails, ArithmeticError, "from the hook"),
        (lambda state, bucket: future_of(ArithmeticError("from the future")), ArithmeticError, "from the future"),
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
