"""An optimizer's step under ``torch.amp.GradScaler``, on a rank that has to count it also where the scaler skips it.

By default the scaler does not call ``step`` at all where this rank's gradients overflowed; no other rank would know.
An optimizer whose ``_step_supports_amp_scaling`` is True is always called, with ``grad_scale`` and ``found_inf``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ScaledStep:
    """The steps of ``optimizer``, which the scaler calls always from now on."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        # A fused optimizer's kernel unscales, and leaves out the step, by itself.
        self._scales_itself = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    def take(self, local_step: Callable[[], Any]) -> Any:
        """``local_step()``; nothing where the scaler found a gradient that is not finite."""
        found_inf: torch.Tensor | None = getattr(self.optimizer, "found_inf", None)
        if found_inf is None or self._scales_itself:
            return local_step()
        scale: torch.Tensor | None = getattr(self.optimizer, "grad_scale", None)
        # torch's plain optimizers refuse to step with them; the scaler deletes both afterwards.
        self.optimizer.grad_scale = self.optimizer.found_inf = None  # type: ignore[attr-defined]
        if bool(found_inf):
            return None
        if scale is not None:  # None: the script has called scaler.unscale_
            factor = scale.double().reciprocal().float().item()
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)
        return local_step()
