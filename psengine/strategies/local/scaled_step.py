"""An optimizer's step under ``torch.amp.GradScaler``, on a rank that has to count it also where the scaler skips it.

By default the scaler does not call ``step`` at all where this rank's gradients overflowed; no other rank would know.
An optimizer whose ``_step_supports_amp_scaling`` is True is always called, with ``grad_scale`` and ``found_inf``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from psengine.errors import ConfigurationError


class ScaledStep:
    """The steps of ``optimizer``, which the scaler calls always from now on; ``release`` ends that."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        # A fused optimizer's kernel unscales, and leaves out the step, by itself.
        self._scales_itself = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    def release(self) -> None:
        """The scaler skips steps by itself again."""
        self.optimizer._step_supports_amp_scaling = self._scales_itself  # type: ignore[attr-defined]

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


def bound(former: ScaledStep | None, optimizer: torch.optim.Optimizer, strategy: str) -> ScaledStep:
    """The steps of ``optimizer``, the only one of a model under ``strategy``; ``former``: what was bound before.

    Raises:
        ConfigurationError: another optimizer was bound before.
    """
    if former is None:
        return ScaledStep(optimizer)
    if former.optimizer is not optimizer:
        raise ConfigurationError(
            f"strategy {strategy!r} counts the steps of one optimizer for each wrapped model (expected one"
            " psengine.DistributedOptimizer, got a second). Fix: give one optimizer several parameter groups; or"
            " wrap the parts of the model one by one, each with its own optimizer; or strategy='sync'."
        )
    return former


def check_bound(stepper: ScaledStep | None, strategy: str) -> ScaledStep:
    """Return ``stepper``.

    Raises:
        ConfigurationError: there is none, so that nobody would count steps.
    """
    if stepper is None:
        raise ConfigurationError(
            f"strategy {strategy!r} exchanges in the optimizer's step (expected optimizer ="
            " psengine.DistributedOptimizer(optimizer, model) before the first backward, got a plain optimizer)"
        )
    return stepper
