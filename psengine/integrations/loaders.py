"""Which loaders' samples are one rank's already, for libraries that deal out every loader's."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from psengine.data.samplers import EvaluationSampler, ProportionalBatchSampler, ProportionalSampler
from psengine.errors import ConfigurationError


def refuse_dealt_out(loader: DataLoader[Any]) -> None:
    """See that ``loader`` yields the whole dataset's samples, alike on all ranks, so that a library may deal them out.

    Raises:
        ConfigurationError: one of psengine's samplers chooses them.
    """
    samplers = [getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    samplers.append(getattr(samplers[1], "sampler", None))
    for sampler in samplers:
        if isinstance(sampler, EvaluationSampler | ProportionalSampler | ProportionalBatchSampler):
            raise ConfigurationError(
                "a loader is dealt out to the ranks once (expected one whose sampler is no psengine sampler, got"
                f" {type(sampler).__name__}, whose part accelerate would deal out again). Fix: leave it out of"
                " accelerator.prepare(), and move batches to accelerator.device; let a Trainer's get_train_dataloader()"
                " return it as it is."
            )
