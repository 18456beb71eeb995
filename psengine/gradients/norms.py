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
    """``torch.nn.utils.clip_grad_norm_(model.parameters(), ...)``, to the last bit; call it on every rank.

    Scales the gradients of ``model``, wrapped or not, in place. Returns their norm before, the same bits on every rank.

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
