"""Workers of a small job, by their sessions."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.worker_session import WorkerSession
from psengine.protocol.layout import ChunkSpec
from support.shard_world import AVERAGE, spec


def entered(
    addresses: str | Sequence[str], rank: int, specs: Sequence[ChunkSpec] = (), **options: Any
) -> WorkerSession:
    """Worker ``rank`` of a job whose chunks begin as zeros, with memory to share; by default it averages, and has one
    chunk.
    """
    options = {"job": "job", "rule": AVERAGE, "timeout_s": 20.0, **options}
    addresses = (addresses,) if isinstance(addresses, str) else addresses
    session = WorkerSession(SessionOptions(addresses=addresses, rank=rank, **options))
    session.segments.reserve(1 << 20)
    session.start()
    session.enter(specs or [spec(0, 4)], lambda one: None if one.table else torch.zeros(one.numel, dtype=one.dtype))
    return session


@contextmanager
def crew(
    addresses: str | Sequence[str], workers: int, specs: Sequence[ChunkSpec] = (), **options: Any
) -> Iterator[list[WorkerSession]]:
    """All workers of a job, by rank, until the end of the block: an averaging job begins when the last one has come."""
    options["world_size"] = workers
    with ExitStack() as stack:
        with ThreadPoolExecutor(workers) as pool:
            sessions = list(pool.map(lambda rank: entered(addresses, rank, specs, **options), range(workers)))
        for session in sessions:
            stack.callback(session.close)
        yield sessions
