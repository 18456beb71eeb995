"""The memory that a worker shares with servers: real memory of this one process, which plays all of them."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch

from psengine.parameter_server.client.segments import WorkerSegments
from psengine.parameter_server.segment import Segment

RESERVED_BYTES = 1 << 20
# What zmq says of a message that came over a Unix socket.
PART: Any = SimpleNamespace(get=lambda name: f"localhost:0:0:{os.getpid()}")


class SimulatedSegments(WorkerSegments):
    """Those of one worker."""

    def __init__(self) -> None:
        super().__init__(is_wanted=True)
        self.reserve(RESERVED_BYTES)
        self._made: Segment | None = self._own
        # By chunk, where its gradients are packed.
        self._gradients: dict[int, torch.Tensor] = {}

    def packed(self, key: int, values: torch.Tensor) -> torch.Tensor:
        """The chunk's gradient, where servers can read it."""
        if key not in self._gradients:
            self._gradients[key] = self.allocate(values.numel(), values.dtype)
        return self._gradients[key].copy_(values)

    def died(self) -> None:
        """The process has ended: the kernel closes what it had open."""
        if self._made is not None:
            self._made.close()
