"""The optimizer that servers run in this process's stead: what it was when they learnt of it, and its step's hooks.

Its own ``step`` never runs. Gradients and hyperparameters travel with every push; which parameters there are, and their
state, do not: where those were changed here, a step at the servers would be another one than this process asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from psengine.errors import ConfigurationError

# What a step is called with, the optimizer first: as torch's hooks get it.
Call = tuple[tuple[Any, ...], dict[str, Any]]


class OptimizerBinding:
    """What ``optimizer`` was when the servers learnt of it.

    Args:
        optimizer: the distributed one.
        exchanged: the parameters whose gradients reach the servers.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, exchanged: Collection[torch.Tensor]) -> None:
        self.optimizer = optimizer
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._untrained = [
            (group_index, index, parameter)
            for group_index, parameters in enumerate(self._groups)
            for index, parameter in enumerate(parameters)
            if parameter not in exchanged
        ]
        self.note_state()

    def note_state(self) -> None:
        """``optimizer.state`` is what the servers have, or had."""
        self._state = self.optimizer.state
        self._state_count = len(self._state)

    def check(self) -> None:
        """See that the servers' step is this optimizer's.

        Raises:
            ConfigurationError: it has other parameters or another state by now, or a gradient that no server applies.
        """
        self.check_groups()
        self._check_untrained()
        self._check_state()
        self._check_unscaled()

    def check_groups(self) -> None:
        """The part of ``check`` that tells whether hyperparameters still fit the parameters."""
        groups = [group["params"] for group in self.optimizer.param_groups]
        if len(groups) != len(self._groups):
            difference = f"expected {len(self._groups)} groups, got {len(groups)}"
        else:
            for index, (known, parameters) in enumerate(zip(self._groups, groups, strict=True)):
                if len(known) != len(parameters):
                    difference = f"expected {len(known)} parameters in group {index}, got {len(parameters)}"
                    break
                if not all(map(is_, known, parameters)):
                    difference = f"expected the same {len(known)} parameters in group {index}, got others"
                    break
            else:
                return
        raise ConfigurationError(
            "the servers train the parameters that the optimizer had when psengine.DistributedOptimizer was made, each"
            f" in its group ({difference}). Fix: give it all of them before, and freeze some until they are wanted"
            " (requires_grad_(False) after the model was wrapped with find_unused_parameters=True): step() leaves those"
            " alone whose gradient is None. Or use strategy='sync-server', where every worker steps itself."
        )

    def _check_untrained(self) -> None:
        for group_index, index, parameter in self._untrained:
            if parameter.grad is not None:
                raise ConfigurationError(
                    f"parameter {index} of group {group_index} (shape {tuple(parameter.shape)}) has a gradient that"
                    " no server applies: when the model was wrapped it was frozen, or one to ignore, or not there yet"
                    " (expected grad = None). Fix: freeze it after psengine.DistributedDataParallel(model,"
                    " find_unused_parameters=True); wrap the model after load_state_dict(..., assign=True); or give it"
                    " an optimizer of its own."
                )

    def _check_state(self) -> None:
        state = self.optimizer.state
        if state is not self._state:
            difference = "expected the mapping that psengine knows, got another"
        elif len(state) < self._state_count:
            difference = f"expected that of {self._state_count} parameters, got {len(state)}"
        else:
            return
        raise ConfigurationError(
            f"optimizer.state is only a copy of the servers', which do not see it change ({difference}). Fix: to set"
            " it, optimizer.load_state_dict(...); to reset it, with {'state': {}, 'param_groups':"
            " optimizer.state_dict()['param_groups']}."
        )

    def _check_unscaled(self) -> None:
        """See that nobody left a scale for torch's fused kernels to divide by, which servers never hear of."""
        scale = getattr(self.optimizer, "grad_scale", None)
        if scale is not None:
            raise ConfigurationError(
                "strategy 'async' does not divide gradients by optimizer.grad_scale (expected it unset, got"
                f" {float(scale)}). Fix: divide the gradients before step(), or let a torch.amp.GradScaler do it."
            )

    # ---- hooks -------------------------------------------------------------------------------------------------

    def call_pre_hooks(self, closure: Callable[[], Any] | None) -> tuple[Call, Callable[[], Any] | None]:
        """Call what ``Optimizer.step`` would call first; return its arguments, which hooks may replace, and the closure
        among them.

        Raises:
            RuntimeError: torch's own, for a hook that returns something else.
        """
        optimizer = self.optimizer
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

    def call_post_hooks(self, call: Call) -> None:
        """Call what ``Optimizer.step`` would call last."""
        hooks = (self.optimizer._optimizer_step_post_hooks, _global_optimizer_post_hooks)
        for hook in tuple(chain.from_iterable(registered.values() for registered in hooks)):
            hook(self.optimizer, *call)


def _closure_of(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """The closure among the arguments of a step."""
    return closure
