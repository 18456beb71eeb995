"""Clipping the averaged gradients of a model by their norm."""

from __future__ import annotations

import torch

from psengine.errors import ArgumentTypeError


def clip_grad_norm_(
    model: torch.nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale ``model``'s averaged gradients in place so that their joint norm is at most ``max_norm``.

    ``torch.nn.utils.clip_grad_norm_(model.parameters(), ...)``, to the last bit. Call it on every rank.

    Args:
        model: any module; wrapped or not.
        max_norm: the largest norm to leave as it is.
        norm_type: which norm.
        error_if_nonfinite: raise where the norm is NaN or infinite, before anything is scaled.
        foreach: see ``torch.nn.utils.clip_grad_norm_``.

    Returns:
        The norm before clipping, a scalar on the first gradient's device. It has the same bits on every rank.

    Raises:
        ArgumentTypeError: ``model`` is no module, such as the parameters that torch's function takes.
        RuntimeError: the norm is not finite, and ``error_if_nonfinite``.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(
            f"psengine.clip_grad_norm_ takes the model itself (expected a torch.nn.Module, got {type(model).__name__})."
            " Fix: psengine.clip_grad_norm_(model, max_norm), without .parameters()."
        )
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type, error_if_nonfinite, foreach)
