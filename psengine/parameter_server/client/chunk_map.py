"""Where a job's chunks are."""

from __future__ import annotations

from collections.abc import Sequence

from psengine.protocol.layout import ChunkSpec


class ChunkMap:
    """The job's chunks and their shards.

    Attributes:
        specs: key -> chunk.
        shard_of: key -> index of the shard that holds it.
    """

    def __init__(self) -> None:
        self.specs: dict[int, ChunkSpec] = {}
        self.shard_of: dict[int, int] = {}

    def place(self, specs: Sequence[ChunkSpec], shards: Sequence[int]) -> None:
        """Replace the map."""
        self.shard_of = {spec.key: shard for spec, shard in zip(specs, shards, strict=True)}
        self.specs = {spec.key: spec for spec in specs}

    def at(self, shard: int) -> list[ChunkSpec]:
        """The chunks of one shard."""
        return [spec for key, spec in self.specs.items() if self.shard_of[key] == shard]
