"""Refuse loaders whose samples are already split among the ranks, for libraries that split every loader."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from psengine.data.samplers import EvaluationSampler, ProportionalBatchSampler, ProportionalSampler
from psengine.errors import ConfigurationError


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
