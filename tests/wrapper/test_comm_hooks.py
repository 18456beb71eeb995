"""Every hook of torch.distributed.algorithms.ddp_comm_hooks, against native DDP with the same hook."""

import torch
import torch.distributed as dist
from support.expectations import raises
from support.native_twins import Net, seeded
from support.processes import in_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from psengine import CommunicationHookError, DistributedDataParallel


def model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


@in_ranks(1)
def test_registration_errors(rank, world_size):
    ddp = DistributedDataParallel(seeded(Net), find_unused_parameters=False)

    def wrong_annotation(state: object, bucket: int) -> torch.futures.Future[torch.Tensor]: ...

    def wrong_return(state: object, bucket: dist.GradBucket) -> int: ...

    def no_bucket(state, gradients): ...

    def returns_tensor(state, bucket):
        return bucket.buffer()

    for hook, text in (
        (wrong_annotation, "bucket annotation should be dist.GradBucket."),
        (wrong_return, "return annotation should be torch.futures.Future[torch.Tensor]."),
        (no_bucket, "expected parameters (state, bucket)"),
    ):
        with raises(ValueError, text):
            ddp.register_comm_hook(None, hook)
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


@in_ranks(2)
def test_powersgd_compresses_with_native_bits(rank, world_size):
    """torch's own hook, for four steps of plain all-reduces and eight of factors with error feedback."""
    twins, states = [], []
    for kind in (nn.parallel.DistributedDataParallel, DistributedDataParallel):
        network = seeded(lambda: nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 48), nn.Linear(48, 3)))
        states.append(PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=4))
        twins.append(kind(network))
        twins[-1].register_comm_hook(states[-1], powerSGD_hook)
    optimizers = [torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9) for twin in twins]
    generator = torch.Generator().manual_seed(rank)
    for step in range(12):
        x = torch.randn(8, 40, generator=generator)
        for twin, optimizer in zip(twins, optimizers, strict=True):
            optimizer.zero_grad()
            twin(x).square().mean().backward()
            optimizer.step()
        for native, ours in zip(*(twin.parameters() for twin in twins), strict=True):
            assert torch.equal(native.grad, ours.grad), step
            assert torch.equal(native, ours), step
    for state in states:
        rate, _, _ = state.compression_stats()
        assert rate > 2, "the matrices were factored"
        assert any(error.any() for error in state.error_dict.values())
