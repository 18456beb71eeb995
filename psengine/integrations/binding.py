"""Which optimizer steps which model, for libraries that meet optimizers and schedulers before they wrap the model."""

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
        """Remember ``model``; where it wraps a module that was wrapped before, it is the one that counts."""
        self._references.insert(0, weakref.ref(model))

    def bind(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return ``optimizer`` distributed over the model that has its parameters.

        Itself where it is distributed already, where no model has any of them, and where they are of several models
        whose workers step themselves.

        Raises:
            ConfigurationError: see ``DistributedOptimizer``; above all, servers cannot step this optimizer.
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
    """Return a plain optimizer with the same parameters and, brought here from wherever it is kept, the same state:
    for libraries that save it once the strategy is closed.
    """
    optimizer.state_dict()
    return copy.copy(optimizer)
