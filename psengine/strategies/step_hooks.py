"""An optimizer whose own ``step`` never runs, because servers or ranks step in its stead: checks, and torch's hooks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from psengine.errors import ConfigurationError

# The arguments of a step, the optimizer first, as torch's hooks get them.
Call = tuple[tuple[Any, ...], dict[str, Any]]


class ReplacedOptimizer:
    """``optimizer`` as it was when psengine.DistributedOptimizer was made.

    Args:
        optimizer: the distributed one.
        exchanged: the parameters whose gradients are exchanged.
        strategy: its name, for messages.

    Attributes:
        groups: the parameters of its groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, exchanged: Collection[torch.Tensor], strategy: str) -> None:
        self.optimizer = optimizer
        self.groups = [list(group["params"]) for group in optimizer.param_groups]
        self._strategy = strategy
        self._untrained = [
            (group_index, index, parameter)
            for group_index, group in enumerate(self.groups)
            for index, parameter in enumerate(group)
            if parameter not in exchanged
        ]
        # A fused optimizer's kernel would divide by GradScaler's scale, which what steps here does not know: so the
        # scaler itself divides, and leaves out steps with gradients that are not finite.
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]

    def check(self) -> None:
        """See that the step in its stead is this optimizer's.

        Raises:
            ConfigurationError: its parameters changed, or there is a gradient that would not be applied.
        """
        self._check_groups()
        for group, index, parameter in self._untrained:
            if parameter.grad is not None:
                raise ConfigurationError(
                    f"parameter {index} of group {group} (shape {tuple(parameter.shape)}) has a gradient that was not"
                    " exchanged: when the model was wrapped it was frozen, or one to ignore, or not there yet (expected"
                    " grad = None). Fix: freeze it after psengine.DistributedDataParallel(model,"
                    " find_unused_parameters=True); wrap the model after load_state_dict(..., assign=True); or give it"
                    " an optimizer of its own."
                )
        scale = getattr(self.optimizer, "grad_scale", None)
        if scale is not None:  # for torch's fused kernels, which divide by it
            raise ConfigurationError(
                f"strategy {self._strategy!r} does not divide gradients by optimizer.grad_scale (expected it unset, got"
                f" {float(scale)}). Fix: divide the gradients before step(), or let a torch.amp.GradScaler do it."
            )

    def _check_groups(self) -> None:
        groups = [group["params"] for group in self.optimizer.param_groups]
        difference = ""
        if len(groups) != len(self.groups):
            difference = f"expected {len(self.groups)} groups, got {len(groups)}"
        for index, (known, parameters) in enumerate(zip(self.groups, groups, strict=False)):
            if not difference and len(known) != len(parameters):
                difference = f"expected {len(known)} parameters in group {index}, got {len(parameters)}"
            elif not difference and not all(map(is_, known, parameters)):
                difference = f"expected the same {len(known)} parameters in group {index}, got others"
        if difference:
            raise ConfigurationError(
                f"strategy {self._strategy!r} trains the parameters that the optimizer had when"
                f" psengine.DistributedOptimizer was made, each in its group ({difference}). Fix: give it all of them"
                " before, and freeze some until they are wanted (requires_grad_(False) after the model was wrapped with"
                " find_unused_parameters=True): step() leaves those alone whose gradient is None. Or use"
                " strategy='sync' or 'sync-server', where every worker steps itself."
            )


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
