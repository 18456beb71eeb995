"""The tensors a collective operation is called with: what they are, and how to work on their memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from psengine.collectives.base import Collective
from psengine.errors import CollectiveError


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements lie on the CPU one after another, as they are."""
    is_dense = tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.is_contiguous()
    return is_dense and not tensor.is_conj() and not tensor.is_neg()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The dense CPU tensor, detached: its own memory where that holds its elements in order, else a copy."""
    tensor = tensor.detach()
    return tensor if is_plain(tensor) else tensor.contiguous().resolve_conj().resolve_neg()


def real(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, a complex one as pairs of real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as which every transport copies what it cannot add up."""
    return tensor.view(-1).view(torch.uint8)


def check_flat(collective: Collective, what: str, flat: torch.Tensor, scale: float = 1.0) -> None:
    """Raise ``CollectiveError`` unless ``flat`` may be written by an operation, and scaled by ``scale``."""
    if not flat.is_sparse and (not flat.is_contiguous() or flat.is_neg() or flat.is_conj()):
        raise _refusal(
            collective,
            what,
            "the tensor that is written must hold its elements one after another (expected a contiguous tensor, got"
            f" shape {tuple(flat.shape)} with strides {flat.stride()}, a negative or conjugate view:"
            f" {flat.is_neg() or flat.is_conj()}). Fix: exchange a contiguous copy",
        )
    if scale != 1.0 and not (flat.is_floating_point() or flat.is_complex()):
        raise _refusal(
            collective, what, f"integers are summed, not scaled (expected scale 1.0 for {flat.dtype}, got {scale})"
        )


def check_parts(collective: Collective, what: str, whole: torch.Tensor, part: torch.Tensor) -> None:
    """Raise ``CollectiveError`` unless ``whole``, contiguous, has room for a ``part`` of every rank."""
    expected_numel = part.numel() * collective.world_size
    if whole.numel() != expected_numel or whole.dtype != part.dtype:
        raise _refusal(
            collective,
            what,
            f"every rank has an equal part of the whole (expected {expected_numel} elements of {part.dtype}, got"
            f" {whole.numel()} of {whole.dtype})",
        )
    check_flat(collective, what, whole)


def _refusal(collective: Collective, what: str, why: str) -> CollectiveError:
    return CollectiveError(f"{what} failed on rank {collective.rank} of {collective.world_size}: {why}")


def are_parts(lists: Any, part: torch.Tensor, world_size: int) -> bool:
    """Whether ``lists`` is one list with a tensor such as ``part`` for each rank."""
    return (
        isinstance(lists, list)
        and len(lists) == 1
        and isinstance(lists[0], list)
        and len(lists[0]) == world_size
        and all(
            t.shape == part.shape and t.dtype == part.dtype and t.device == part.device and t.layout == part.layout
            for t in lists[0]
        )
    )


def are_multiples(wholes: list[torch.Tensor], parts: list[torch.Tensor], world_size: int) -> bool:
    """Whether each of ``wholes`` has room for every rank's part, such as that of ``parts``."""
    return len(wholes) == len(parts) and all(
        whole.numel() == part.numel() * world_size and whole.dtype == part.dtype
        for whole, part in zip(wholes, parts, strict=True)
    )


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
