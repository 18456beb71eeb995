"""SyncAllReduce(dtype=...): what travels is narrower, what the optimizer sees is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.native_extension import SHARED_MEMORY
from support.processes import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Native

import psengine
from psengine.errors import ConfigurationError
from psengine.strategies.registry import resolve_strategy


def compress(dtype, bucket):
    """torch's fp16_compress_hook for any dtype; its bf16_compress_hook insists on a GPU."""
    compressed = bucket.buffer().to(dtype).div_(dist.get_world_size())
    future = dist.all_reduce(compressed, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def build() -> nn.Module:
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    return nn.Sequential(convolution, nn.Flatten(), nn.Linear(8 * 36, 200), nn.Tanh(), nn.Linear(200, 3))


def train(rank: int, world_size: int, dtype: str, options: dict[str, Any]) -> None:
    """Against native DDP's compression hook: it casts, divides, sums and casts back, in four passes."""
    ours = psengine.DistributedDataParallel(build(), strategy=f"sync:dtype={dtype}", **options)
    native = Native(build())
    native.register_comm_hook(getattr(torch, dtype), compress)
    # What differs in a last place (see below) must not grow from step to step.
    learning_rate = 0.0 if dtype == "float16" else 0.01
    optimizers = [torch.optim.SGD(model.parameters(), lr=learning_rate) for model in (ours, native)]
    generator = torch.Generator().manual_seed(rank)
    for step in range(5):
        x = torch.randn(4, 3, 8, 8, generator=generator)
        for model, optimizer in zip((ours, native), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            model(x).square().sum().backward()
        for (name, p), q in zip(ours.named_parameters(), native.parameters(), strict=True):
            assert p.grad.dtype == torch.float32
            # Halving is exact, so between two ranks both round alike; but not halving what is subnormal in float16,
            # which native rounds twice: a few sums then end on the other side of a tie.
            one_unit = 2**-10 if dtype == "float16" else 0.0
            assert torch.allclose(p.grad, q.grad, rtol=one_unit, atol=one_unit * 2**-14), name
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["copies", "views"])
@pytest.mark.parametrize("collective", [SHARED_MEMORY, "c10d"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_equals_native_with_a_compression_hook(dtype, collective, options):
    if dtype == "float16":
        options = {**options, "bucket_cap_mb": 0.5}
    run_ranks(train, 2, dtype, {"collective": collective, **options})


class Products(nn.Module):
    """Parameters whose gradients are ``factors``."""

    def __init__(self, values: list[torch.Tensor], factors: list[Any]) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(value) for value in values])
        self.factors = factors

    def forward(self) -> torch.Tensor:
        products = [(p * f).sum() for p, f in zip(self.values, self.factors, strict=True)]
        return sum((p.real if p.is_complex() else p).float() for p in products)


def three_ranks(rank: int, world_size: int) -> list[torch.Tensor]:
    torch.manual_seed(rank)
    gradients = [torch.randn(200, 300), torch.randn(7)]
    module = Products([torch.zeros_like(g) for g in gradients], gradients)
    model = psengine.DistributedDataParallel(module, strategy=psengine.SyncAllReduce(dtype=torch.bfloat16))
    model().backward()
    return gradients + [p.grad for p in module.parameters()]


def test_each_addend_and_the_average_are_rounded_once():
    results = run_ranks(three_ranks, 3)
    for index in range(2):
        addends = [(result[index].float() * (1 / 3)).bfloat16().double() for result in results]
        expected = sum(addends)
        for result in results:
            average = result[2 + index].double()
            assert torch.equal(average, results[0][2 + index].double())
            # float32 sums of three numbers of eight bits, rounded to eight bits: half a unit in the last place.
            assert ((average - expected).abs() <= expected.abs() * 2**-8 + 1e-9).all()


def mixed(rank: int, world_size: int) -> None:
    dtypes = (torch.float64, torch.float16, torch.complex64)
    module = Products([torch.zeros(3, dtype=dtype) for dtype in dtypes], [rank + 1.0] * 3)
    model = psengine.DistributedDataParallel(module, strategy="sync:dtype=bfloat16")
    model().backward()
    for p, dtype in zip(module.parameters(), dtypes, strict=True):
        assert p.grad.dtype == dtype
        assert p.grad.tolist() == [1.5] * 3, p.grad


def test_only_wider_floats_are_converted():
    run_ranks(mixed, 2)


def test_choices():
    assert repr(resolve_strategy("sync:dtype=bfloat16")) == "SyncAllReduce(dtype=torch.bfloat16)"
    assert repr(psengine.SyncAllReduce()) == "SyncAllReduce()"
    for dtype in ("int8", torch.int64, 16, "torch.bfloat16"):
        with pytest.raises(
            ConfigurationError, match=r"dtype must be None or one of \['bfloat16', 'float16', 'float32'\]"
        ):
            psengine.SyncAllReduce(dtype=dtype)
    with pytest.raises(ConfigurationError, match="a communication hook decides itself what travels"):
        psengine.SyncAllReduce(dtype=torch.float16).register_comm_hook(lambda bucket: None)
