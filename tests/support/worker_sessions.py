"""Workers of a small job, by their sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.worker_session import WorkerSession
from psengine.protocol.layout import ChunkSpec
from support.shard_world import AVERAGE, spec


def entered(address: str, rank: int, specs: Sequence[ChunkSpec] = (), **options: Any) -> WorkerSession:
    """Worker ``rank`` of an averaging job whose chunks (by default one, of four elements) begin as zeros."""
    options = {"job": "job", "rule": AVERAGE, "timeout_s": 20.0, **options}
    session = WorkerSession(SessionOptions(addresses=(address,), rank=rank, **options))
    session.start()
    session.enter(specs or [spec(0, 4)], lambda one: torch.zeros(one.numel, dtype=one.dtype))
    return session
