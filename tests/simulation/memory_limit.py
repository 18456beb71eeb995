"""The limit of a shard's memory, and its oracle, which counts the tensors that a shard refers to.

Only values and optimizer state are held against the limit: nothing refuses a push, so gradients that wait for others,
averages that somebody may ask for, and what workers hold under a codec of differences come on top.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from psengine.errors import PSEngineError, ServerRefusedError
from psengine.parameter_server.server.core.shard import Shard
from psengine.protocol.messages import ErrorCode
from simulation.violation import require

if TYPE_CHECKING:
    from simulation.scenario import Scenario
    from simulation.server import ServerWitness

UNLIMITED_BYTES = 8 << 30
# Counting takes longer than most events.
EVENTS_PER_COUNT = 8


class MemoryLimit:
    """Of each shard of a job.

    Args:
        model_bytes: the job's values.
    """

    def __init__(self, scenario: Scenario, model_bytes: int) -> None:
        self.is_limited = scenario.room is not None
        self.limit_bytes = int(model_bytes * scenario.room) if scenario.room is not None else UNLIMITED_BYTES
        self._events = itertools.count()

    def has_refused(self, error: PSEngineError | None) -> bool:
        """Whether a worker ended because a server has no room: then its error says which, and what to do."""
        if not isinstance(error, ServerRefusedError) or error.code != ErrorCode.MEMORY:
            return False
        text = str(error)
        is_named = "tcp://10.0.0." in text and "--max-memory-bytes" in text and str(self.limit_bytes) in text
        require(self.is_limited and is_named, "a worker ended for lack of memory, and its error says: {}", text)
        return True

    def witness(self, job: Any) -> ServerWitness:
        """The oracle of the job, and this one."""
        return _Both(job, self) if self.is_limited else job

    def check(self, shard: Shard) -> None:
        """Values and optimizer state are within the limit."""
        if next(self._events) % EVENTS_PER_COUNT:
            return
        size_bytes = _kept_bytes(shard)
        require(
            size_bytes <= self.limit_bytes,
            "shard {} keeps {} bytes, its limit is {}",
            shard.index,
            size_bytes,
            self.limit_bytes,
        )


class _Both:
    """A ``ServerWitness``."""

    def __init__(self, job: Any, limit: MemoryLimit) -> None:
        self._job, self._limit = job, limit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)

    def after(self, server: Any, shard: Shard, *arguments: Any) -> None:
        """See ``ServerWitness``."""
        self._job.after(server, shard, *arguments)
        self._limit.check(shard)


def _kept_bytes(shard: Shard) -> int:
    """Bytes of the values and of what optimizers keep, each memory once."""
    found: dict[int, int] = {}
    for job in shard.jobs.by_number.values():
        for rule in job.chunks.rules.values():
            for tensor in vars(rule.outcome).values():
                if isinstance(tensor, torch.Tensor):
                    found[tensor.data_ptr()] = tensor.nbytes
            optimizer = rule.outcome.optimizer
            for tensor in () if optimizer is None else optimizer.slots().values():
                found[tensor.data_ptr()] = tensor.nbytes
    return sum(found.values())
