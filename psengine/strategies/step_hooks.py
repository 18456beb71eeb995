"""A step in the place of an optimizer's own, because servers step, or each rank a range of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def take_step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, step: Callable[[], None]) -> Any:
    """Call ``step`` without gradients where ``optimizer.step(closure)`` would step, between its hooks.

    Returns:
        What the closure returned; None without one.

    Raises:
        RuntimeError: torch's own, for a hook that returns something else than arguments.
    """

    def replaced(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        with torch.no_grad():
            step()
        optimizer._opt_called = True  # what learning-rate schedulers look for
        return result

    arguments = () if closure is None else (closure,)
    return torch.optim.Optimizer.profile_hook_step(replaced)(optimizer, *arguments)
