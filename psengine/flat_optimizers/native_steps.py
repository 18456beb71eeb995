"""SGD's step in one native pass over memory, where it has torch's bits: csrc/kernels/step.inl. Pure.

torch takes a pass for each operation: with momentum, Nesterov and weight decay four that read and write the chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from psengine.kernels import native

# csrc/kernels/kernels.h, ScalarKind
_KINDS = {torch.float32: 0, torch.float64: 1}
# torch gives each of its threads as many elements or more (at::internal::GRAIN_SIZE); the native pass has one thread.
_TORCH_GRAIN_NUMEL = 32768


def step_sgd(
    values: Tensor,
    gradient: Tensor,
    momentum_buffer: Tensor | None,
    options: Mapping[str, Any],
    *,
    is_first: bool,
    into: Tensor,
) -> bool:
    """Write the values after a step of SGD to ``into``; False, and nothing is written, where torch has to do it.

    Args:
        values: 1-D, contiguous, on the CPU.
        gradient: like the values; read only.
        momentum_buffer: like the values; mutated. None without momentum.
        options: torch.optim.SGD's.
        is_first: the momentum buffer holds nothing yet.
        into: like the values, or the values themselves.
    """
    kind, numel = _KINDS.get(values.dtype), values.numel()
    if kind is None or not gradient.is_contiguous() or not _has_bits_of_torch(values.dtype):
        return False
    if numel > _TORCH_GRAIN_NUMEL and torch.get_num_threads() > 1:
        return False
    _call(kind, numel, values, gradient, momentum_buffer, options, is_first, into)
    return True


def _call(
    kind: int,
    numel: int,
    values: Tensor,
    gradient: Tensor,
    momentum_buffer: Tensor | None,
    options: Mapping[str, Any],
    is_first: bool,
    into: Tensor,
) -> None:
    native.extension.step_sgd(
        kind,
        numel,
        values.data_ptr(),
        into.data_ptr(),
        gradient.data_ptr(),
        0 if momentum_buffer is None else momentum_buffer.data_ptr(),
        options["lr"],
        options["momentum"],
        options["dampening"],
        options["weight_decay"],
        is_first,
        options["nesterov"],
        options["maximize"],
    )


@functools.cache
def _has_bits_of_torch(dtype: torch.dtype) -> bool:
    """Whether the native pass rounds as this torch does on this processor (ATEN_CPU_CAPABILITY may restrict torch)."""
    if native.extension is None:
        native.say_if_missing()
        return False
    like: dict[str, Any] = {"dtype": dtype, "device": "cpu"}  # whatever the default device is
    generator = torch.Generator("cpu").manual_seed(0)
    numel = 203  # whole vectors, and a rest
    for momentum, dampening, weight_decay in ((0.0, 0.0, 0.0), (0.9, 0.1, 0.01), (0.9, 0.0, 0.01)):
        options: dict[str, Any] = {"lr": 0.1, "momentum": momentum, "dampening": dampening}
        options |= {"weight_decay": weight_decay, "nesterov": bool(momentum and not dampening), "maximize": False}
        expected = torch.randn(numel, generator=generator, **like)
        values, buffer = expected.clone(), torch.zeros(numel, **like)
        buffers: list[Tensor | None] = [None]
        for step in range(2):
            gradient = torch.randn(numel, generator=generator, **like)
            sgd([expected], [gradient], buffers, foreach=False, fused=False, **options)
            _call(_KINDS[dtype], numel, values, gradient, buffer if momentum else None, options, step == 0, values)
        kept = buffers[0]
        if not torch.equal(values, expected) or (kept is not None and not torch.equal(buffer, kept)):
            return False
    return True
