"""What a worker of a server strategy trains in tests: models, batches and optimizers, the same in every process."""

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import psengine
from support.processes import run_ranks

STEPS = 12


class Model(nn.Module):
    """Odd sizes, a parameter of several chunks, buffers, channels_last weights, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.normalise = nn.BatchNorm2d(5)
        self.wide = nn.Linear(5 * 6 * 6, 2003)
        self.head = nn.Linear(2003, 7)
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = F.relu(self.normalise(self.convolution(x))).flatten(1)
        return self.head(F.relu(self.wide(features))) + self.frozen


def batches(rank: int, steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1000 + rank)
    return [
        (torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 7, (4,), generator=generator))
        for _ in range(steps)
    ]


def build(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def wrap(strategy: psengine.Strategy, seed: int = 0, **options: Any) -> Any:
    return psengine.DistributedDataParallel(build(seed), strategy=strategy, **options)


def train(wrapped: Any, optimizer: torch.optim.Optimizer, data: Any) -> None:
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def use(server: Any) -> None:
    os.environ["PSENGINE_SERVERS"] = server


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), f"{name}: {(a[name].float() - b[name].float()).abs().max()}"


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def at_servers(workers: int) -> Callable[[Callable[[int, int], None]], Callable[[Any], None]]:
    """For a test whose body runs in workers of the fixture ``server``: ``def test_something(rank, world_size)``.

    A worker that is alone has no process group.
    """

    def decorate(body: Callable[[int, int], None]) -> Callable[[Any], None]:
        def test(server: Any) -> None:
            place = server.addresses[0], body.__module__, body.__name__
            run_ranks(_run_body, workers, *place, init_group=workers > 1)

        test.__name__, test.__module__, test.__doc__ = body.__name__, body.__module__, body.__doc__
        test.body = body  # type: ignore[attr-defined]
        return test

    return decorate


def _run_body(rank: int, world_size: int, address: str, module: str, name: str) -> None:
    use(address)
    getattr(importlib.import_module(module), name).body(rank, world_size)
