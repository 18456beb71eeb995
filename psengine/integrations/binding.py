"""Find the model of an optimizer, for libraries that prepare optimizers before or after they wrap the model."""

from __future__ import annotations

import copy
import weakref

import torch

from psengine.wrapper.ddp import DistributedDataParallel
from psengine.wrapper.optimizer import DistributedOptimizer


class WrappedModels:
    """The models that one object of a library has wrapped, for as long as it uses them."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[DistributedDataParallel]] = []

    def add(self, model: DistributedDataParallel) -> None:
        """Remember ``model``; of several wrappers of one module the last counts."""
        self._references.insert(0, weakref.ref(model))

    def bind(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return ``optimizer`` distributed over the model that has its parameters.

        Return ``optimizer`` itself if it is distributed already, if no model has any of its parameters, or if they
        belong to several models and workers step themselves.

        Raises:
            ConfigurationError: servers cannot step this optimizer; see ``DistributedOptimizer``.
        """
        if "_psengine_strategy" in vars(optimizer):
            return optimizer
        wanted = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        concerned = []
        for model in filter(None, [reference() for reference in self._references]):
            owned = set(model.module.parameters())
            if wanted <= owned:
                return DistributedOptimizer(optimizer, model)
            if not wanted.isdisjoint(owned):
                concerned.append(model)
        if all(model.strategy.capabilities.workers_step for model in concerned):
            return optimizer
        return DistributedOptimizer(optimizer, concerned[0])


def detached(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a plain optimizer with the same parameters and state, for libraries that save it after the strategy is
    closed. The state is fetched from the servers if it is there.
    """
    optimizer.state_dict()
    return copy.copy(optimizer)
