"""Checks and views of the tensors of a collective operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from psengine.collectives.base import Collective
from psengine.errors import CollectiveError


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The dense tensor, detached: its own memory where that holds its elements in order, else a copy."""
    return tensor.detach().contiguous().resolve_conj().resolve_neg()


def real(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, a complex one as pairs of real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor: every transport copies bytes."""
    return tensor.view(-1).view(torch.uint8)


def check_flat(collective: Collective, what: str, flat: torch.Tensor, scale: float = 1.0) -> None:
    """Raise ``CollectiveError`` unless ``flat`` may be written by an operation, and scaled by ``scale``."""
    if not flat.is_sparse and (not flat.is_contiguous() or flat.is_neg() or flat.is_conj()):
        raise _refusal(
            collective,
            what,
            "the tensor that is written holds its elements one after another (expected a contiguous tensor, no negative"
            f" or conjugate view, got shape {tuple(flat.shape)} with strides {flat.stride()}). Fix: exchange a copy",
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


def copying(places: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Return a function that copies ``results`` to ``places``, where they are not there already."""
    pairs = [(p.detach(), r) for p, r in zip(places, results, strict=True) if p.data_ptr() != r.data_ptr()]

    def copy() -> None:
        for place, result in pairs:
            place.copy_(result)

    return copy
