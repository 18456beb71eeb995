"""A step as ``Optimizer.step`` would take it, hooks included, for strategies in whose steps that method never runs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

# The arguments of a step, the optimizer first, as torch's hooks get them.
Call = tuple[tuple[Any, ...], dict[str, Any]]


def take_step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, step: Callable[[], None]) -> Any:
    """Call ``step`` without gradients where ``optimizer.step(closure)`` would step, between its hooks.

    Returns:
        What the closure returned; None without one.

    Raises:
        RuntimeError: torch's own, for a hook that returns something else.
    """
    call, closure = _call_pre_hooks(optimizer, closure)
    result = None
    if closure is not None:
        with torch.enable_grad():
            result = closure()
    with torch.no_grad():
        step()
    optimizer._opt_called = True  # type: ignore[attr-defined]  # what learning-rate schedulers look for
    _call_post_hooks(optimizer, call)
    return result


def _call_pre_hooks(
    optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None
) -> tuple[Call, Callable[[], Any] | None]:
    """Call the hooks before ``Optimizer.step``; return its arguments, which hooks may replace, and their closure."""
    arguments: tuple[Any, ...] = (optimizer,) if closure is None else (optimizer, closure)
    options: dict[str, Any] = {}
    hooks = (_global_optimizer_pre_hooks, optimizer._optimizer_step_pre_hooks)
    for hook in tuple(chain.from_iterable(registered.values() for registered in hooks)):
        replaced: Any = hook(optimizer, arguments, options)
        if replaced is None:
            continue
        if not isinstance(replaced, tuple) or len(replaced) != 2:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step must return None or a tuple of (new_args, new_kwargs), but got"
                f" {replaced}."
            )
        arguments, options = replaced
    return (arguments, options), _closure_of(*arguments, **options)


def _call_post_hooks(optimizer: torch.optim.Optimizer, call: Call) -> None:
    """Call the hooks after ``Optimizer.step``."""
    hooks = (optimizer._optimizer_step_post_hooks, _global_optimizer_post_hooks)
    for hook in tuple(chain.from_iterable(registered.values() for registered in hooks)):
        hook(optimizer, *call)


def _closure_of(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """The closure among the arguments of a step."""
    return closure
