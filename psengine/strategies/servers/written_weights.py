"""Were parameters written to here, whose values the servers keep?"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from psengine.parameter_server.client.worker_session import WorkerSession
    from psengine.strategies.servers.chunked_replica import ChunkedReplica

logger = logging.getLogger(__name__)


class WrittenWeights:
    """The parameters as the servers sent them.

    Args:
        session: the worker's.
        chunks: the replica's.
        parameters: name to parameter.
    """

    def __init__(
        self, session: WorkerSession, chunks: ChunkedReplica, parameters: Mapping[str, torch.nn.Parameter]
    ) -> None:
        self._session = session
        self._chunks = chunks
        self._parameters = list(parameters.values())
        self.note()

    def note(self) -> None:
        """The parameters are as the servers sent them."""
        self._noted = self._count_writes()

    def are_edited(self) -> bool:
        """Whether something else has written to them since."""
        return self._count_writes() != self._noted

    def _count_writes(self) -> tuple[int, int]:
        """Changes with every write that torch counts, and when a parameter is given other memory."""
        return sum(p._version for p in self._parameters), hash(tuple(p.data_ptr() for p in self._parameters))

    def store_edited(self) -> None:
        """Where parameters were written to (``load_state_dict``): worker 0's go to the servers, others' are lost."""
        if not self.are_edited():
            return
        from psengine.parameter_server.client.operation import wait_all
        from psengine.protocol.layout import ChunkKind

        if self._session.rank != 0:
            logger.warning(
                "parameters were written on worker %d; the servers' weights count, and overwrite them with this step."
                " Only worker 0's writes (load_state_dict) reach the servers.",
                self._session.rank,
            )
        else:
            logger.warning("parameters were written on worker 0; they become the servers' weights")
            specs = [spec for spec in self._chunks.specs if spec.kind is not ChunkKind.USAGE]
            wait_all([self._session.store(spec.key, self._chunks.values(spec)) for spec in specs])
        self.note()


def count_landing(tensors: Iterable[torch.Tensor]) -> None:
    """Count bytes that landed in ``tensors`` as a write: older graphs and other models may depend on what they were."""
    torch.autograd.graph.increment_version(tensors)
