"""DistributedOptimizer: an optimizer that steps as the strategy decides."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.amp import GradScaler

from psengine.errors import ArgumentTypeError, ConfigurationError
from psengine.strategies.base import Strategy
from psengine.strategies.stepping import check_whole_state
from psengine.tables import Tables
from psengine.tracing.timeline import span
from psengine.wrapper.ddp import DistributedDataParallel


def DistributedOptimizer(  # noqa: N802 - reads as the class it returns an instance of
    optimizer: torch.optim.Optimizer, model: DistributedDataParallel
) -> torch.optim.Optimizer:
    """Let ``optimizer.step`` go through ``model``'s strategy; return ``optimizer``.

    It becomes an instance of a subclass of its class: learning-rate schedulers, made before or after, and
    ``GradScaler`` accept it, and its state_dict is interchangeable with the plain optimizer's.

    Args:
        optimizer: any ``torch.optim.Optimizer`` over parameters of ``model``; mutated.
        model: the wrapped model.

    Raises:
        ArgumentTypeError: another type was given.
        ConfigurationError: ``optimizer`` is distributed already, has parameters that the model has not, or its ``step``
            was replaced by something else than a scheduler.
    """
    if not (isinstance(optimizer, torch.optim.Optimizer) and isinstance(model, DistributedDataParallel)):
        raise ArgumentTypeError(
            "expected a torch.optim.Optimizer and a model wrapped in psengine.DistributedDataParallel (got"
            f" {type(optimizer).__name__} and {type(model).__name__})"
        )
    if isinstance(optimizer, _StrategyStep):
        raise ConfigurationError("the optimizer is a psengine.DistributedOptimizer already; use it as it is")
    _check_step(optimizer)
    known = set(model.module.parameters())
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if parameter not in known:
                raise ConfigurationError(
                    f"parameter {index} of group {group_index} (shape {tuple(parameter.shape)}) is not one of the"
                    " model's. Fix: build the optimizer from model.parameters(), after moving the model to its device."
                )
    stand_ins = model._tables.stand_ins
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter not in stand_ins]
    model.strategy.bind(optimizer)
    vars(optimizer).pop("step", None)  # a scheduler's, which calls the plain class's
    optimizer.__class__ = _distributed_class(type(optimizer))  # type: ignore[arg-type]
    distributed: Any = optimizer
    distributed._psengine_strategy, distributed._psengine_tables = model.strategy, model._tables
    model._tables.distribute()
    distributed._psengine_scales_itself = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    model._optimizers.add(optimizer)
    return optimizer


def _check_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigurationError where something else than a scheduler has replaced ``step``."""
    replaced: Any = vars(optimizer).get("step")
    # Both: whoever wraps the scheduler's wrapper with functools.wraps copies its mark.
    is_scheduler = hasattr(replaced, "_wrapped_by_lr_sched") and replaced.__wrapped__ is type(optimizer).step
    if replaced is not None and not is_scheduler:
        raise ConfigurationError(
            f"the optimizer's step was replaced (expected {type(optimizer).__name__}.step or a scheduler's, got"
            f" {replaced!r}), and would bypass the strategy. Fix: replace the step after psengine.DistributedOptimizer."
        )


class _StrategyStep(torch.optim.Optimizer):
    """What a distributed optimizer adds to its class."""

    _psengine_strategy: Strategy
    _psengine_tables: Tables

    def step(self, closure: Callable[[], float] | None = None, **options: Any) -> Any:
        """Step as the strategy says, and the tables' rows; arguments and result are the wrapped class's."""
        self._opt_called = True  # what a scheduler looks for, which leaves this step alone
        if closure is not None and isinstance(self, torch.optim.LBFGS):
            closure = functools.partial(_average_loss, closure, self._psengine_strategy)
        local_step = functools.partial(super().step, closure, **options)
        tables, found_inf = self._psengine_tables, getattr(self, "found_inf", None)
        with span("optimizer step"):
            # A fused optimizer leaves such a step out itself.
            if tables and found_inf is not None and found_inf.item():
                tables.drop()
                return self._psengine_strategy.step(local_step, closure)
            scaler = self._scaler() if tables and closure is None else None
            if tables and closure is None:
                tables.begin_step(None if scaler is None else scaler.get_scale())
            result = self._psengine_strategy.step(local_step, closure)
            if tables and closure is not None:
                tables.begin_step()
            if tables.end_step() and scaler is not None:
                # All workers are told, so their scales stay equal.
                for found in scaler._per_optimizer_states[id(self)]["found_inf_per_device"].values():
                    found.fill_(1.0)
            return result

    # Without it torch would wrap this method when a state is loaded, and call a step's hooks twice.
    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def _scaler(self) -> GradScaler | None:
        """The ``GradScaler`` that scaled the gradients of this step, which calls it; None without one.

        A scaler tells it to no optimizer but fused ones, so that frame is looked for.
        """
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code is GradScaler.step.__code__:
                scaler: GradScaler = frame.f_locals["self"]
                return scaler if scaler.is_enabled() else None
            frame = frame.f_back
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the wrapped class's parameters, and of the model's tables."""
        super().zero_grad(set_to_none)
        self._psengine_tables.drop()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped class's state, with the state that servers keep."""
        self._psengine_strategy.fetch_optimizer_state(self)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped class's state; send the servers the part that they keep."""
        super().load_state_dict(state_dict)
        self._psengine_strategy.store_optimizer_state(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy belongs to no model: it is a plain optimizer again.
        check_whole_state(self)
        plain_class = type(self).__mro__[2]
        return object.__new__, (plain_class,), self.__getstate__()


def _average_loss(closure: Callable[[], Any], strategy: Strategy) -> Any:
    """Evaluate the ``closure`` of an optimizer that searches along a line: workers must take the same decisions."""
    loss = torch.as_tensor(closure()).detach()
    return loss.new_tensor(strategy.average_loss(float(loss)))


@functools.cache
def _distributed_class(plain_class: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The subclass of ``plain_class`` with a distributed step."""
    return type(f"Distributed{plain_class.__name__}", (_StrategyStep, plain_class), {})
