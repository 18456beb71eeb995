"""The tensors an operation of a process group is called with: what they are, and how to work on their memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself where its memory is its elements in order, else such a copy."""
    tensor = tensor.detach()
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def real(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, a complex one as pairs of real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def copying(places: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> Callable[[], None] | None:
    """What copies ``results`` to their places, or None where they are there."""
    pairs = [(p.detach(), r) for p, r in zip(places, results, strict=True) if p.data_ptr() != r.data_ptr()]
    if not pairs:
        return None

    def copy() -> None:
        for place, result in pairs:
            place.copy_(result)

    return copy


def given(opts: Any) -> tuple[Any, ...]:
    """The options as arguments: none where there are none, because C++ takes no None."""
    return () if opts is None else (opts,)


def _tensors(values: Any) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(_tensors(value))
    return found


def have_cuda(values: Any) -> bool:
    """Whether there is a CUDA tensor among ``values``, or in their lists."""
    return any(tensor.device.type == "cuda" for tensor in _tensors(values))


def describe(arguments: Any) -> str:
    """The kinds of tensors among ``arguments`` and the reduction, for errors."""
    kinds = {f"{str(t.layout).removeprefix('torch.')} {t.dtype} on {t.device}" for t in _tensors(arguments)}
    operation = next((str(a.reduceOp.op) for a in arguments if hasattr(a, "reduceOp")), "")
    return ", ".join(sorted(kinds) + ([operation] if operation else []))
