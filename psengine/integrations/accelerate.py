"""Hugging Face accelerate over psengine: an Accelerator that wraps models in psengine's wrapper.

model, optimizer, loader = PSEngineAccelerator(strategy="async").prepare(model, optimizer, loader)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from psengine.data.samplers import EvaluationSampler, ProportionalBatchSampler, ProportionalSampler
from psengine.environment.installation import missing_extra
from psengine.errors import ConfigurationError
from psengine.integrations.binding import WrappedModels
from psengine.strategies.base import Strategy
from psengine.strategies.registry import resolve_strategy
from psengine.wrapper.ddp import DistributedDataParallel

try:
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from accelerate.utils import DynamoBackend  # type: ignore[import-untyped]
except ImportError as error:
    raise missing_extra("psengine's accelerators", error, "integrations") from error


class PSEngineAccelerator(Accelerator):  # type: ignore[misc]  # accelerate has no types
    """An ``Accelerator`` whose ``prepare`` wraps models in psengine's wrapper, and binds their optimizers to it.

    Args:
        strategy: how replicas synchronise, as for ``psengine.DistributedDataParallel``; so is ``collective``.
        options: accelerate's own; the wrapper's others come from its ``DistributedDataParallelKwargs``.

    Raises:
        ConfigurationError: accelerate is set up for something else than data parallelism (FSDP, DeepSpeed, ...).
    """

    def __init__(
        self, *arguments: Any, strategy: str | Strategy | None = None, collective: Any = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        adopt(self, strategy=strategy, collective=collective)

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Prepare ``model`` as accelerate does for evaluation, and wrap it for training."""
        if evaluation_mode or getattr(model, "_is_accelerate_prepared", False) or not self._wraps(model):
            return super().prepare_model(model, device_placement, evaluation_mode)
        plugin = self.state.dynamo_plugin
        backend, plugin.backend = plugin.backend, DynamoBackend.NO  # compiled last, below
        try:
            prepared = super().prepare_model(model, device_placement, evaluation_mode=True)
        finally:
            plugin.backend = backend
        del prepared._is_accelerate_prepared  # the wrapper is; the module may be prepared again
        options = self.ddp_handler.to_kwargs() if self.ddp_handler is not None else {}
        device_ids = None if self.device.type == "cpu" or hasattr(model, "hf_device_map") else [self.device]
        wrapped = DistributedDataParallel(prepared, device_ids=device_ids, **options, **self._wrapper_options)
        if self.ddp_handler is not None:
            self.ddp_handler.register_comm_hook(wrapped)
        self._wrapped.add(wrapped)
        self._bind_optimizers()
        result: Any = wrapped if backend == DynamoBackend.NO else torch.compile(wrapped, **plugin.to_kwargs())
        result._is_accelerate_prepared = True
        return result

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare ``optimizer`` as accelerate does, and bind it to the model whose parameters it has."""
        prepared = super().prepare_optimizer(optimizer, device_placement)
        self._bind_optimizers()
        return prepared

    def prepare_data_loader(self, data_loader: Any, *arguments: Any, **options: Any) -> Any:
        """Prepare ``data_loader`` as accelerate does, which splits its batches among the ranks."""
        refuse_split(data_loader)
        return super().prepare_data_loader(data_loader, *arguments, **options)

    def _wraps(self, model: torch.nn.Module) -> bool:
        strategy = resolve_strategy(self._wrapper_options["strategy"] or None)
        is_trained = any(parameter.requires_grad for parameter in model.parameters())
        return is_trained and (self.use_distributed or not strategy.capabilities.needs_process_group)

    def _bind_optimizers(self) -> None:
        for prepared in self._optimizers:
            bound = self._wrapped.bind(prepared.optimizer)
            if bound is not prepared.optimizer:
                prepared.optimizer = bound
                prepared.__setstate__({})  # what GradScaler is shown is made from the optimizer's step


def adopt(accelerator: Accelerator, **options: Any) -> None:
    """Turn an ``Accelerator`` that somebody else made (a Trainer) into a ``PSEngineAccelerator``, in place."""
    if not accelerator.multi_device and accelerator.distributed_type not in ("NO", "MULTI_CPU"):
        raise ConfigurationError(
            "psengine takes native DDP's place in accelerate (expected data parallelism, got"
            f" {accelerator.distributed_type}). Fix: leave out the plugin, or use accelerate's own Accelerator."
        )
    if not isinstance(accelerator, PSEngineAccelerator):
        accelerator.__class__ = PSEngineAccelerator
    accelerator._wrapper_options, accelerator._wrapped = options, WrappedModels()


def refuse_split(loader: DataLoader[Any]) -> None:
    """Check that ``loader`` yields the same samples on all ranks, so that a library may split them.

    Raises:
        ConfigurationError: it has one of psengine's samplers.
    """
    samplers = [getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    samplers.append(getattr(samplers[1], "sampler", None))
    for sampler in samplers:
        if isinstance(sampler, EvaluationSampler | ProportionalSampler | ProportionalBatchSampler):
            raise ConfigurationError(
                "a loader's samples are split among the ranks once (expected a loader without a psengine sampler, got"
                f" {type(sampler).__name__}, whose samples accelerate would split again). Fix: do not pass it to"
                " accelerator.prepare(); a Trainer's get_train_dataloader() may return it."
            )
