"""Hugging Face transformers' Trainer over psengine.

    trainer = PSEngineTrainer(strategy="async:staleness_scaling=inverse", model=model, args=arguments, ...)

For another Trainer class: ``class MyTrainer(PSEngineTrainerMixin, Seq2SeqTrainer): ...``
"""

from __future__ import annotations

import logging
from typing import Any

from psengine.environment.installation import missing_extra
from psengine.integrations.binding import detached
from psengine.strategies.base import Strategy
from psengine.wrapper.ddp import DistributedDataParallel

try:
    from transformers import Trainer

    from psengine.integrations.accelerate import adopt
except ImportError as error:
    raise missing_extra("psengine's trainers", error, "integrations") from error

logger = logging.getLogger(__name__)


class PSEngineTrainerMixin:
    """Put before a Trainer class: its accelerator wraps the model in psengine's wrapper. When ``train`` ends, the
    optimizer's state comes here from the servers, and this worker leaves.

    Args:
        strategy: how replicas synchronise, as for ``psengine.DistributedDataParallel``; so is ``collective``. The
            wrapper's other arguments are ``TrainingArguments``' own (``ddp_find_unused_parameters``,
            ``ddp_bucket_cap_mb``, ...).
        options: the Trainer's.
    """

    accelerator: Any
    args: Any
    model: Any
    model_wrapped: Any
    optimizer: Any

    def __init__(
        self, *arguments: Any, strategy: str | Strategy | None = None, collective: Any = None, **options: Any
    ) -> None:
        self._psengine_options = {"strategy": strategy, "collective": collective}
        super().__init__(*arguments, **options)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator as the Trainer does, and let it wrap models in psengine's wrapper."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        adopt(self.accelerator, **self._psengine_options)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save as the Trainer does, which asks for the optimizer's state on the main process alone."""
        self.optimizer.state_dict()
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def train(self, *arguments: Any, **options: Any) -> Any:
        """Train as the Trainer does; called again, it wraps the model again."""
        try:
            result = super().train(*arguments, **options)  # type: ignore[misc]
            if "_psengine_strategy" in vars(self.optimizer.optimizer):
                self.optimizer.optimizer = detached(self.optimizer.optimizer)
        finally:
            wrapped, self.model_wrapped = self.model_wrapped, self.model
            wrapped = getattr(wrapped, "_orig_mod", wrapped)  # torch.compile's
            if isinstance(wrapped, DistributedDataParallel):
                wrapped.leave()
        return result


class PSEngineTrainer(PSEngineTrainerMixin, Trainer):
    """transformers' ``Trainer`` with psengine's wrapper; see ``PSEngineTrainerMixin`` for its arguments."""
