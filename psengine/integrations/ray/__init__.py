"""Ray Train over psengine: a ``torch_config`` for Ray's ``TorchTrainer``.

    trainer = TorchTrainer(train, torch_config=PSEngineConfig("async"), scaling_config=ScalingConfig(num_workers=4))
    trainer.fit()

Ray starts the workers, and starts them again. The servers are actors in the workers' placement group.
"""

from __future__ import annotations

from psengine.environment.installation import missing_extra

try:
    from psengine.integrations.ray.backend import PSEngineConfig
    from psengine.integrations.ray.reporting import report
except ImportError as error:
    raise missing_extra("psengine's workers and servers under Ray", error, "ray") from error

__all__ = ["PSEngineConfig", "report"]
