"""DistributedOptimizer: the optimizer whose ``step`` is the strategy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from psengine.errors import ArgumentTypeError, ConfigurationError
from psengine.parallel import DistributedDataParallel
from psengine.strategies.base import Strategy

_classes: dict[type[torch.optim.Optimizer], type[torch.optim.Optimizer]] = {}


def DistributedOptimizer(  # noqa: N802 - reads as the class it returns an instance of
    optimizer: torch.optim.Optimizer, model: DistributedDataParallel
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class, with the same state, whose ``step`` goes through ``model``'s strategy.

    The result shares parameter groups, state and hooks with ``optimizer``, which should no longer be used by itself.
    It is a true instance of that class, so learning-rate schedulers and ``GradScaler`` accept it, and its state_dict
    is interchangeable with the plain optimizer's. Where workers step themselves ("sync"), so does it.

    Args:
        optimizer: any ``torch.optim.Optimizer`` over parameters of ``model``.
        model: the wrapped model.

    Raises:
        ArgumentTypeError: another type was given.
        ConfigurationError: ``optimizer`` is distributed already, has parameters that the model has not, or a scheduler
            was attached to it before.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentTypeError(f"expected a torch.optim.Optimizer (got {type(optimizer).__name__})")
    if not isinstance(model, DistributedDataParallel):
        raise ArgumentTypeError(
            f"expected a model wrapped in psengine.DistributedDataParallel (got {type(model).__name__})"
        )
    if isinstance(optimizer, _StrategyStep):
        raise ConfigurationError("the optimizer is a psengine.DistributedOptimizer already; use it as it is")
    if "step" in vars(optimizer):
        # A scheduler replaced the instance's step by a wrapper around the class's own, which would bypass ours.
        raise ConfigurationError(
            "a learning-rate scheduler is attached to the optimizer; create psengine.DistributedOptimizer first and"
            " the scheduler from it"
        )
    _check_parameters(optimizer, model)
    distributed = object.__new__(_distributed_class(type(optimizer)))
    distributed.__dict__ = optimizer.__dict__
    distributed._psengine_strategy = model.strategy  # type: ignore[attr-defined]
    model.strategy.bind_optimizer(distributed)
    return distributed


def _check_parameters(optimizer: torch.optim.Optimizer, model: DistributedDataParallel) -> None:
    known = set(model.module.parameters())
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if parameter not in known:
                raise ConfigurationError(
                    f"parameter {index} of group {group_index} (shape {tuple(parameter.shape)}) is not one of the"
                    " model's, so its gradient is not exchanged. Build the optimizer from model.parameters(), after the"
                    " model was moved to its device."
                )


class _StrategyStep(torch.optim.Optimizer):
    """What a distributed optimizer adds to its class."""

    _psengine_strategy: Strategy

    def step(self, closure: Callable[[], float] | None = None, **options: Any) -> Any:
        """Step as the strategy says; arguments and result are the wrapped class's."""
        local_step = super().step
        return self._psengine_strategy.step(lambda: local_step(closure, **options), closure)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped class's, with the state that servers keep."""
        self._psengine_strategy.fetch_optimizer_state(self)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The wrapped class's; state that servers keep goes there."""
        super().load_state_dict(state_dict)
        self._psengine_strategy.store_optimizer_state(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy belongs to no model: it is a plain optimizer again.
        plain_class = type(self).__mro__[2]
        return object.__new__, (plain_class,), self.__getstate__()


def _distributed_class(plain_class: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The subclass of ``plain_class`` with a distributed step; one for each class."""
    if plain_class not in _classes:
        _classes[plain_class] = type(
            f"Distributed{plain_class.__name__}",
            (_StrategyStep, plain_class),
            {"__doc__": plain_class.__doc__, "__module__": __name__},
        )
    return _classes[plain_class]
