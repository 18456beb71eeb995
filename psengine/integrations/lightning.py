"""Lightning over psengine: a strategy for the Trainer, and one for Fabric.

    Trainer(strategy=PSEngineStrategy("async:staleness_scaling=inverse"), accelerator="cpu", devices=2)
    Fabric(strategy=PSEngineFabricStrategy("sync"), accelerator="cpu", devices=2)

After ``register()``, names do: "psengine" (PSENGINE_STRATEGY, else "sync"), "psengine-sync-server", "psengine-async".
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from psengine.collectives.base import Collective
from psengine.environment.installation import missing_extra
from psengine.integrations.binding import WrappedModels, detached
from psengine.strategies.base import Strategy
from psengine.wrapper.ddp import DistributedDataParallel

try:
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
except ImportError as error:
    raise missing_extra("psengine's strategies for Lightning", error, "integrations") from error

NAMES = {"psengine": None, "psengine-sync-server": "sync-server", "psengine-async": "async"}


class _Wrapping:
    """What both strategies share."""

    def __init__(
        self, strategy: str | Strategy | None = None, *, collective: str | Collective | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._wrapper_options = {"strategy": strategy, "collective": collective}
        self._wrapped = WrappedModels()

    def _wrap(self, module: torch.nn.Module) -> DistributedDataParallel:
        device_ids = None if self.root_device.type == "cpu" else [self.root_device]  # type: ignore[attr-defined]
        options = {**self._ddp_kwargs, **self._wrapper_options}  # type: ignore[attr-defined]
        wrapped = DistributedDataParallel(module, device_ids=device_ids, **options)
        self._wrapped.add(wrapped)
        return wrapped

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Add our names."""
        for name, strategy in NAMES.items():
            strategy_registry.register(name, functools.partial(cls, strategy), description=__doc__, override=True)


class PSEngineStrategy(_Wrapping, DDPStrategy):
    """The Trainer's DDP strategy with psengine's wrapper, which the optimizers step through until training ends.

    Args:
        strategy: how replicas synchronise, as for ``psengine.DistributedDataParallel``; so is ``collective``.
        options: Lightning's (``timeout``, ...) and the wrapper's (``find_unused_parameters``, ``check_finite``, ...).
    """

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        return self._wrap(model)

    def setup_optimizers(self, trainer: Any) -> None:
        """Create optimizers and schedulers as the module says, and bind the optimizers to the wrapper."""
        super().setup_optimizers(trainer)
        self.optimizers = [self._wrapped.bind(optimizer) for optimizer in self.optimizers]

    def on_train_end(self) -> None:
        """Bring the optimizers' state here while there are servers to ask."""
        super().on_train_end()
        self.optimizers = [detached(optimizer) for optimizer in self.optimizers]

    def teardown(self) -> None:
        """Leave the others, and give the module back without its wrapper."""
        model = self.model
        super().teardown()
        if isinstance(model, DistributedDataParallel):
            model.leave()


class PSEngineFabricStrategy(_Wrapping, FabricDDPStrategy):
    """Fabric's, likewise."""

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        """Wrap ``module``."""
        return self._wrap(module)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Bind ``optimizer`` to the wrapper whose parameters it has."""
        return self._wrapped.bind(optimizer)


def register() -> None:
    """Let Trainer and Fabric know psengine's strategies by name."""
    PSEngineStrategy.register_strategies(StrategyRegistry)
    PSEngineFabricStrategy.register_strategies(STRATEGY_REGISTRY)
