"""The programs of docs/extending.md: each registers itself, and trains as its text says."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_ranks

import psengine

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
RANKS, STEPS, LEARNING_RATE = 2, 4, 0.1


def load(module: str) -> dict[str, Any]:
    """Run the page's program that begins with this module's name; return its names."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (source,) = (block for block in blocks if block.startswith(f'"""{module}.py"""'))
    names: dict[str, Any] = {"__name__": module}
    exec(compile(source, f"{module}.py", "exec"), names)
    return names


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def parameters_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def train(rank: int, world_size: int, module: str, options: dict[str, Any]) -> list[torch.Tensor]:
    load(module)
    model = psengine.DistributedDataParallel(make_model(), **options)
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch_of(rank, step)).square().mean().backward()
        optimizer.step()
    return parameters_of(model.module)


def train_plainly(agree: Callable[[int, list[torch.Tensor]], list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Replicas in one process; ``agree`` maps the step, from 1 on, and each replica's flat gradients to new ones."""
    models = [make_model() for _ in range(RANKS)]
    for step in range(STEPS):
        flats = []
        for rank, model in enumerate(models):
            model.zero_grad()
            model(batch_of(rank, step)).square().mean().backward()
            flats.append(torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]))
        for model, flat in zip(models, agree(step + 1, flats), strict=True):
            parameters = list(model.parameters())
            parts = flat.split([parameter.numel() for parameter in parameters])
            with torch.no_grad():
                for parameter, part in zip(parameters, parts, strict=True):
                    parameter.sub_(part.view_as(parameter), alpha=LEARNING_RATE)
    return [parameters_of(model) for model in models]


def average(flats: list[torch.Tensor]) -> list[torch.Tensor]:
    return [sum(flats) / RANKS] * RANKS


def with_error_feedback() -> list[list[torch.Tensor]]:
    left_out = [torch.zeros(())] * RANKS

    def agree(step: int, flats: list[torch.Tensor]) -> list[torch.Tensor]:
        sent = []
        for rank, flat in enumerate(flats):
            wanted = flat + left_out[rank]
            large = wanted.abs() > 0.5 * wanted.abs().mean()
            ternary = wanted.sign() * large * wanted.abs()[large].mean()
            left_out[rank] = wanted - ternary
            sent.append(ternary)
        return average(sent)

    return train_plainly(agree)


ORACLES = {
    "ternary": ({"strategy": "sync:compress=ternary,threshold=0.5"}, with_error_feedback),
    "wide_sum": ({"collective": "wide-sum"}, lambda: train_plainly(lambda step, flats: average(flats))),
    "second_step": (
        {"strategy": "second-step:every=2"},
        lambda: train_plainly(lambda step, flats: average(flats) if step % 2 == 0 else flats),
    ),
}


@pytest.mark.parametrize("module", ORACLES)
def test_a_program_of_the_page_trains_as_its_text_says(module):
    options, oracle = ORACLES[module]
    found = run_ranks(train, RANKS, module, options)
    for parameters, expected in zip(found, oracle(), strict=True):
        torch.testing.assert_close(parameters, expected, rtol=1e-5, atol=1e-6)
