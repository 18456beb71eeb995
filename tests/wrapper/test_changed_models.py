"""What a script changes behind the wrapper's back: gradients' memory, lazy gradients, the parameters' dtype."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from support.expectations import raises
from support.processes import in_ranks
from support.server_training import at_servers
from torch import nn

import psengine
from psengine.errors import ReductionError


def images(step: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def average_gradients(model: nn.Module, step: int, world_size: int) -> list[torch.Tensor]:
    """By plain arithmetic, on a copy of ``model``."""
    plain = copy.deepcopy(model)
    plain.zero_grad()
    for rank in range(world_size):
        (plain(images(step, rank)).square().mean() / world_size).backward()
    return [parameter.grad for parameter in plain.parameters()]


def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.data = parameter.grad.data.clamp(-1e3, 1e3)


def to_channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)


@at_servers(2)
def test_gradients_that_are_views_survive_a_new_data(rank, world_size):
    for name in ("sync", "sync-server"):
        for change in (clamp, to_channels_last):
            for set_to_none in (True, False):
                torch.manual_seed(0)
                # The second layer's gradient is packed by itself.
                model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3))
                ddp = psengine.DistributedDataParallel(model, gradient_as_bucket_view=True, strategy=name)
                for step in range(4):
                    expected = average_gradients(model, step, world_size)
                    ddp.zero_grad(set_to_none=set_to_none)
                    ddp(images(step, rank)).square().mean().backward()
                    for parameter, gradient in zip(model.parameters(), expected, strict=True):
                        torch.testing.assert_close(parameter.grad, gradient, msg=f"{name} {change} {step}")
                    change(model)
                ddp.leave()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.spare = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 4)
        self.spare.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.to(self.body.weight.dtype)).to(self.head.weight.dtype))


def there_and_back(model: nn.Module) -> None:
    model.double()
    model.float()


def head_to_double(model: nn.Module) -> None:
    model.head.double()


@at_servers(2)
def test_conversions_after_wrapping_are_refused(rank, world_size):
    cases: list[tuple[Callable[[nn.Module], Any], dict[str, Any], int]] = [
        # How many steps may pass until it is said.
        (nn.Module.double, {}, 0),
        (nn.Module.double, {"strategy": "sync-server"}, 0),
        (nn.Module.double, {"find_unused_parameters": True}, 0),
        (there_and_back, {}, 1),
        (head_to_double, {}, 1),
        (head_to_double, {"static_graph": True}, 1),
    ]

    def train(ddp: nn.Module, steps: int) -> None:
        for _ in range(steps):
            ddp.zero_grad()
            ddp(torch.full((1, 4), 1.0 + rank)).sum().backward()

    for change, options, silent_steps in cases:
        torch.manual_seed(0)
        ddp = psengine.DistributedDataParallel(Head(), **options)
        train(ddp, 3)
        change(ddp.module)
        train(ddp, silent_steps)
        name = "'head.weight'" if change is head_to_double else "'body.weight'"
        with raises(ReductionError, "dtype and device", name, f"rank {rank}", "Fix: call .double()"):
            train(ddp, 1)
        ddp.leave()

    # With a search the lost parameter looks like an unused one.
    ddp = psengine.DistributedDataParallel(Head(), find_unused_parameters=True)
    train(ddp, 2)
    ddp.module.head.double()
    with raises(ReductionError, "'head.weight'"):
        train(ddp, 1)

    # Another parameter in the place of one is no unused one (pytorch #102212).
    ddp = psengine.DistributedDataParallel(Head())
    train(ddp, 1)
    ddp.module.body.weight = nn.Parameter(torch.ones(4, 4))
    train(ddp, 1)
    with raises(ReductionError, "'body.weight'", f"rank {rank} is another object", "assign=True"):
        train(ddp, 1)

    # A forward without a backward is no conversion, and who only evaluates may convert.
    ddp = psengine.DistributedDataParallel(Head(), find_unused_parameters=True)
    ddp(torch.ones(1, 4))
    train(ddp, 2)
    with torch.no_grad():
        ddp.double()
        ddp(torch.ones(1, 4))


@in_ranks(2)
def test_derivatives_by_the_input_are_refused_by_their_name(rank, world_size):
    x = torch.full((2, 4), 1.0 + rank)
    ddp = psengine.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, eps=1.0)))
    for _ in range(2):
        with raises(ReductionError, "torch.func", "'1.running_mean'", "Fix: transform model.module"):
            torch.func.grad(lambda x: ddp(x).sum())(x)
        ddp(x).sum().mul(1.0 + rank).backward()
    assert ddp.module[1].bias.grad.tolist() == [6.0] * 4

    ddp = psengine.DistributedDataParallel(nn.Linear(4, 4), static_graph=True)
    (slope,) = torch.autograd.grad(ddp(x.requires_grad_()).sum(), x, create_graph=True)
    with raises(ReductionError, "a gradient penalty", f"rank {rank}", "Fix: static_graph=False"):
        slope.square().sum().backward()
