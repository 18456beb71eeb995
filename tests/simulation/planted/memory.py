"""Bugs of memory: its limit, and places in it that workers share with servers."""

from __future__ import annotations

from typing import Any

from psengine.parameter_server.server.rules.step import StepOutcome

from psengine.parameter_server.server.rules.chunk_store import ChunkStore
from psengine.parameter_server.server.rules.contribution_set import ContributionSet
from psengine.parameter_server.server.transport.segments import ShardSegments
from simulation.planted.registry import plant

plant(
    "memory is taken without a limit",
    ChunkStore,
    "register",
    lambda register: (
        lambda self, message: (setattr(self, "_take_memory", lambda size_bytes, what: None), register(self, message))[1]
    ),
)


plant(
    "weights are written over while a worker reads them",
    StepOutcome,
    "_next_memory",
    lambda next_memory: lambda self: self._memories[0] if self._memories else next_memory(self),
)


def _frees_places(keep_members: Any) -> Any:
    def one(self: ShardSegments, shard: Any) -> None:
        before = dict(self._segments)
        keep_members(self, shard)
        for key, segment in before.items():
            for read in tuple(segment.reads) if key not in self._segments else ():
                segment.leave(read)

    return one


plant("who loses its membership reads no more", ShardSegments, "keep_members", _frees_places)


def _gives_a_borrowed_gradient(combine: Any) -> Any:
    def one(self: ContributionSet) -> Any:
        self.by_rank = {rank: given._replace(is_borrowed=False) for rank, given in self.by_rank.items()}
        return combine(self)

    return one


plant("an average is the worker's own memory", ContributionSet, "combine", _gives_a_borrowed_gradient)
