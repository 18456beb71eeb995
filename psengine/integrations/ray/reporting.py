"""Ray's reports of workers that do not wait for each other.

``ray.train.report`` is a meeting of all workers. Independent workers do not meet: there worker 0 reports, alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import ray.train
from ray.train import Checkpoint
from ray.train.v2._internal.execution.callback import TrainContextCallback
from ray.train.v2._internal.execution.checkpoint.report_handler import ReportCallbackHandler
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.worker_group import WorkerGroup

from psengine.environment.variables import read_variable
from psengine.errors import ConfigurationError


def report(metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> None:
    """Report metrics and a checkpoint to Ray Train, under any strategy. Every worker calls it equally often.

    In a process group it is ``ray.train.report``, and all workers wait for each other. Of independent workers only
    worker 0 reports, and does not wait. In both cases the result has worker 0's metrics.

    Args:
        metrics: numbers and text by name.
        checkpoint: a folder that this worker wrote; under independent workers only worker 0's is kept.
    """
    if not read_variable("PSENGINE_WORKER") or ray.train.get_context().get_world_rank() == 0:
        ray.train.report(dict(metrics), checkpoint=checkpoint)


def let_worker_0_report_alone(worker_group: WorkerGroup) -> None:
    """Make Ray's reports of this group complete with worker 0's; called where the controller runs.

    Ray does this itself while a node is being preempted.
    """
    worker_group.set_required_barrier_ranks([0])
    for callback in worker_group._callbacks:
        if isinstance(callback, ReportCallbackHandler):
            callback.set_required_ranks([0])


def refuse_reports_of_others() -> None:
    """Turn a report by a worker other than 0, which would wait for ever, into an error; called in a worker."""
    if ray.train.get_context().get_world_rank() != 0:
        get_train_context().get_context_callbacks().append(_Refusal())


class _Refusal(TrainContextCallback):  # type: ignore[misc]
    def on_report(self) -> AbstractContextManager[None]:
        raise ConfigurationError(
            "ray.train.report makes all workers wait for each other, and independent workers do not (expected a call in"
            f" worker 0 alone, got one in worker {ray.train.get_context().get_world_rank()}). Fix: call"
            " psengine.integrations.ray.report instead, in every worker; or ray.train.report where"
            " context.is_main_process."
        )
