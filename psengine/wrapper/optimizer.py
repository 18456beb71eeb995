"""DistributedOptimizer: an optimizer that steps as the strategy decides."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from psengine.errors import ArgumentTypeError, ConfigurationError
from psengine.strategies.base import Strategy
from psengine.tracing.timeline import span
from psengine.wrapper.ddp import DistributedDataParallel
from psengine.wrapper.switching import scales_itself


def DistributedOptimizer(  # noqa: N802 - reads as the class it returns an instance of
    optimizer: torch.optim.Optimizer, model: DistributedDataParallel
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class, with the same state, whose ``step`` goes through ``model``'s strategy.

    The result shares parameter groups, state and hooks with ``optimizer``, which is mutated; use only the result. It is
    a true instance of that class: learning-rate schedulers and ``GradScaler`` accept it, and its state_dict is
    interchangeable with the plain optimizer's. A scheduler made before, from ``optimizer``, sets the result's rates.

    Args:
        optimizer: any ``torch.optim.Optimizer`` over parameters of ``model``.
        model: the wrapped model.

    Raises:
        ArgumentTypeError: another type was given.
        ConfigurationError: ``optimizer`` is distributed already, has parameters that the model has not, or its ``step``
            was replaced by something else than a scheduler.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentTypeError(f"expected a torch.optim.Optimizer (got {type(optimizer).__name__})")
    if not isinstance(model, DistributedDataParallel):
        raise ArgumentTypeError(
            f"expected a model wrapped in psengine.DistributedDataParallel (got {type(model).__name__})"
        )
    if isinstance(optimizer, _StrategyStep):
        raise ConfigurationError("the optimizer is a psengine.DistributedOptimizer already; use it as it is")
    has_scheduler = _has_scheduler(optimizer)
    known = set(model.module.parameters())
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if parameter not in known:
                raise ConfigurationError(
                    f"parameter {index} of group {group_index} (shape {tuple(parameter.shape)}) is not one of the"
                    " model's, so its gradient is not exchanged. Build the optimizer from model.parameters(), after the"
                    " model was moved to its device."
                )
    distributed = object.__new__(_distributed_class(type(optimizer)))  # type: ignore[arg-type]
    distributed.__dict__ = optimizer.__dict__
    distributed._psengine_strategy = model.strategy  # type: ignore[attr-defined]
    distributed._psengine_scales_itself = scales_itself(optimizer)  # type: ignore[attr-defined]
    model.strategy.bind(distributed)
    model.note_optimizer(distributed)
    if has_scheduler:
        _replace_scheduled_step(distributed)
    return distributed


def _has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scheduler has replaced ``step`` by a wrapper around the class's own, to notice when it is called first.

    Raises:
        ConfigurationError: something else replaced it.
    """
    if "step" not in vars(optimizer):
        return False
    replaced = vars(optimizer)["step"]
    # Both: whoever wraps the scheduler's wrapper with functools.wraps copies its mark.
    is_scheduler = hasattr(replaced, "_wrapped_by_lr_sched") and replaced.__wrapped__ is type(optimizer).step
    if not is_scheduler:
        raise ConfigurationError(
            f"the optimizer's step was replaced (expected {type(optimizer).__name__}.step or a scheduler's, got"
            f" {replaced!r}), and would bypass the strategy. Fix: replace the step of psengine.DistributedOptimizer."
        )
    return True


def _replace_scheduled_step(distributed: torch.optim.Optimizer) -> None:
    """Let ``step`` notice its calls as the scheduler's own would, which is bound to the plain class."""
    reference = weakref.ref(distributed)

    @functools.wraps(type(distributed).step)
    def step(*arguments: Any, **options: Any) -> Any:
        target = reference()
        if target is None:
            raise ConfigurationError(
                "the optimizer that psengine.DistributedOptimizer returned is gone. Fix: keep it, and step that one."
            )
        target._opt_called = True  # type: ignore[attr-defined]
        return type(target).step(target, *arguments, **options)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    distributed.step = step  # type: ignore[method-assign]


class _StrategyStep(torch.optim.Optimizer):
    """What a distributed optimizer adds to its class."""

    _psengine_strategy: Strategy

    def step(self, closure: Callable[[], float] | None = None, **options: Any) -> Any:
        """Step as the strategy says; arguments and result are the wrapped class's."""
        local_step = functools.partial(super().step, closure, **options)
        with span("optimizer step"):
            return self._psengine_strategy.step(local_step, closure)

    # Without it torch would wrap this method when a state is loaded, and call a step's hooks twice.
    step.hooked = True  # type: ignore[attr-defined]

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
        plain_class = type(self).__mro__[2]
        return object.__new__, (plain_class,), self.__getstate__()


@functools.cache
def _distributed_class(plain_class: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The subclass of ``plain_class`` with a distributed step."""
    return type(
        f"Distributed{plain_class.__name__}",
        (_StrategyStep, plain_class),
        {"__doc__": plain_class.__doc__, "__module__": __name__},
    )
