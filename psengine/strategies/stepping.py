"""The third of a strategy's interfaces: what ``psengine.DistributedOptimizer`` asks when it steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from psengine.errors import ConfigurationError, ReductionError


class Stepping:
    """How optimizers step. By default each worker steps its own."""

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer`` will step through this strategy.

        Raises:
            ConfigurationError: the strategy cannot apply this kind of optimizer.
        """

    def step(self, local_step: Callable[[], Any], closure: Callable[[], Any] | None = None) -> Any:
        """``optimizer.step(closure)``: return what it returns. Default: this worker steps itself.

        Args:
            local_step: the optimizer's own step, closure included.
            closure: what the user passed, for strategies that do not call ``local_step``.
        """
        return local_step()

    def average_loss(self, loss: float) -> float:
        """What an optimizer goes by that chooses its step by the loss (LBFGS), each time that its closure has run: the
        same on all workers that step alike. Default: this worker's own loss.
        """
        return loss

    def fetch_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Before ``optimizer.state_dict()``: bring its state here from wherever it is kept."""

    def store_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """After ``optimizer.load_state_dict()``: take the new state to wherever it is kept."""


def check_one(optimizers: Iterable[torch.optim.Optimizer], strategy: str) -> None:
    """Raise ConfigurationError unless ``optimizers`` are at most one, as ``strategy`` needs it."""
    found = len({id(optimizer) for optimizer in optimizers})
    if found > 1:
        raise ConfigurationError(
            f"strategy {strategy!r} steps one optimizer for each wrapped model (expected at most one"
            f" psengine.DistributedOptimizer, got {found}). Fix: give one optimizer several parameter groups; or use"
            " strategy='sync' or 'sync-server', where every worker steps any number of optimizers itself."
        )


def check_whole_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise ReductionError where ``optimizer``, which is sharded, has this rank's part of the state only."""
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if not known.issuperset(key for key in optimizer.state if isinstance(key, torch.Tensor)):
        raise ReductionError(
            "the sharded optimizer has this rank's part of the state only (expected all of it). Fix: call"
            " optimizer.state_dict() on every rank before the optimizer is copied, or its model moves to another group."
        )
