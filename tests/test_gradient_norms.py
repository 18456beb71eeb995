"""psengine.clip_grad_norm_ against torch's on the averaged gradients, and whether it reads them again."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from native_extension import needs_shared_memory
from processes import run_ranks
from torch import nn

import psengine

# float32 norms of a few thousand values: torch adds in float32, psengine in float64.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-7}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 3), nn.Linear(3, 1))


def count_reads(function: Any) -> tuple[Any, int]:
    """Call ``function``; how many gradients it read to take their norm."""
    reads = []
    real = torch.nn.utils.get_total_norm

    def counting(tensors: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        reads.extend(tensors)
        return real(tensors, *arguments, **options)

    with mock.patch("torch.nn.utils.get_total_norm", counting):
        return function(), len(reads)


def clip(rank: int, world_size: int, options: dict[str, Any], max_norm: float) -> dict[str, Any]:
    model = psengine.DistributedDataParallel(build(), **options)
    twin = psengine.DistributedDataParallel(build(), **options)
    generator = torch.Generator().manual_seed(rank)
    reads, norms = [], []
    for _ in range(4):
        x = torch.randn(8, 300, generator=generator)
        for m in (model, twin):
            m.zero_grad()
            m(x).square().sum().backward()
        norm, read = count_reads(lambda: psengine.clip_grad_norm_(model, max_norm))
        expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
        assert norm.dtype == expected.dtype
        assert norm.shape == expected.shape
        assert torch.allclose(norm, expected, **TOLERANCE)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad, **TOLERANCE)
        reads.append(read)
        norms.append(norm.item())
    return {"reads": reads, "norms": norms}


@needs_shared_memory  # and the kernels that come with it
@pytest.mark.parametrize("max_norm", [1e-3, 1e6])
@pytest.mark.parametrize(
    ("options", "reads"),
    [
        ({"collective": "shared_memory"}, [6, 0, 0, 0]),
        ({"collective": "shared_memory", "gradient_as_bucket_view": True}, [6, 0, 0, 0]),
        ({"collective": "shared_memory", "strategy": "sync:dtype=bfloat16"}, [6, 0, 0, 0]),
        ({"collective": "c10d"}, [6, 0, 0, 0]),
        ({"collective": "c10d", "gradient_as_bucket_view": True}, [6, 6, 6, 6]),  # no pass reads the average
    ],
    ids=str,
)
def test_equals_torch_without_reading_again(options, reads, max_norm):
    results = run_ranks(clip, 2, options, max_norm)
    assert results[0] == results[1], "the norm has the same bits on every rank"
    assert results[0]["reads"] == reads


class Mixed(nn.Module):
    """Parameters of several dtypes; the first one's is the narrowest."""

    def __init__(self, dtypes: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(torch.zeros(300, dtype=dtype)) for dtype in dtypes])

    def forward(self, factor: float) -> torch.Tensor:
        products = [(p * torch.full((300,), factor, dtype=p.dtype)).sum() for p in self.values]
        return sum((p.real if p.is_complex() else p).float() for p in products)


def mixed(rank: int, world_size: int, dtypes: tuple[torch.dtype, ...]) -> None:
    model, twin = (psengine.DistributedDataParallel(Mixed(dtypes)) for _ in range(2))
    for factor in (1.0, 2000.0, 3000.0):
        for m in (model, twin):
            m.zero_grad()
            m(factor).backward()
        exact = sum(p.grad.abs().double().square().sum() for p in twin.parameters()).sqrt()
        norm = psengine.clip_grad_norm_(model, 1.0)
        expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        assert norm.dtype == expected.dtype
        # torch rounds the norm of a bfloat16 gradient to bfloat16, on its way to the others' too.
        assert torch.allclose(norm.double(), exact, rtol=2**-8)
        assert torch.allclose(norm, expected, rtol=2**-7)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad, rtol=1e-2)


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float64),
        (torch.complex64, torch.float32),
        (torch.float32, torch.complex64),
    ],
    ids=str,
)
def test_models_of_several_dtypes(dtypes):
    run_ranks(mixed, 2, dtypes)


def changed_gradients(rank: int, world_size: int) -> None:
    model = psengine.DistributedDataParallel(build())
    x = torch.ones(2, 300)
    changes = {
        "nothing": lambda: None,
        "in place": lambda: model.module[0].weight.grad.mul_(2),
        "foreach": lambda: torch._foreach_mul_([p.grad for p in model.parameters()], 0.5),
        "loss scale": lambda: torch._amp_foreach_non_finite_check_and_unscale_(
            [p.grad for p in model.parameters()], torch.zeros(1), torch.tensor(0.25)
        ),
        "replaced": lambda: setattr(model.module[2].bias, "grad", torch.ones(3)),
        "removed": lambda: setattr(model.module[2].bias, "grad", None),
        "accumulated": lambda: accumulate(model, x),
    }
    for name, change in changes.items():
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
            change()
            expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            assert torch.allclose(psengine.clip_grad_norm_(model, 1.0), expected, **TOLERANCE), name


def accumulate(model: Any, x: torch.Tensor) -> None:
    with model.no_sync():
        model(x).sum().backward()


def test_changed_gradients_are_read_again():
    run_ranks(changed_gradients, 2)


def odd_models(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    module = nn.ModuleDict({"used": nn.Linear(4, 4), "never": nn.Linear(4, 4), "ignored": nn.Linear(4, 4)})
    module.forward = lambda x: module["ignored"](module["used"](x))
    module._ddp_params_and_buffers_to_ignore = ["ignored.weight", "ignored.bias"]
    model = psengine.DistributedDataParallel(module, find_unused_parameters=True)
    module["never"].weight.grad = torch.full((4, 4), 3.0)  # stays what it is, and counts
    for _ in range(3):
        for parameter in (*module["used"].parameters(), *module["ignored"].parameters()):
            parameter.grad = None
        model(torch.ones(2, 4)).sum().backward()
        expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        assert torch.allclose(psengine.clip_grad_norm_(model, 1e6), expected, **TOLERANCE)


def test_unused_and_ignored_parameters_count():
    run_ranks(odd_models, 2)


def other_calls(rank: int, world_size: int) -> None:
    model = psengine.DistributedDataParallel(build())
    assert psengine.clip_grad_norm_(model, 1.0) == 0.0, "no gradients yet"
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(2, 300)).sum().backward()
        expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], float("inf"))
        assert torch.equal(psengine.clip_grad_norm_(model, 1e9, norm_type=float("inf")), expected)
        model.module[0].weight.grad[0, 0] = float("nan")
        with pytest.raises(RuntimeError, match=r"check_finite=True names the parameter|non-finite"):
            psengine.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    plain = build()
    plain(torch.ones(2, 300)).sum().backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert torch.equal(psengine.clip_grad_norm_(plain, 1e9), expected), "a module that is not wrapped"


def test_other_norms_errors_and_modules():
    run_ranks(other_calls, 2)


def test_parameters_in_the_place_of_the_model_are_refused_with_the_fix():
    with pytest.raises(psengine.ArgumentTypeError, match=r"got generator\).*clip_grad_norm_\(model, max_norm\)"):
        psengine.clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0)
