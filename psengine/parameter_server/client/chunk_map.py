"""Where a job's chunks are, and whether tensors fit them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psengine.errors import ConfigurationError
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

    def spec(self, key: int) -> ChunkSpec:
        """One chunk.

        Raises:
            ConfigurationError: there is no such chunk.
        """
        spec = self.specs.get(key)
        if spec is None:
            raise ConfigurationError(
                f"there is no chunk {key} (expected one of {len(self.specs)}; enter the job first, or call layout())"
            )
        return spec


def check_tensors(tensors: Sequence[torch.Tensor], spec: ChunkSpec, what: str) -> None:
    """Raise ConfigurationError unless ``tensors``, one after the other, hold the chunk's elements on the CPU."""
    numel = 0
    for tensor in tensors:
        numel += tensor.numel()
        if tensor.dtype is not spec.dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ConfigurationError(
                f"the {what} does not fit {spec.describe()} (expected contiguous elements of {spec.dtype} on cpu,"
                f" got shape {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}, strides {tensor.stride()})"
            )
    if numel != spec.numel:
        raise ConfigurationError(
            f"the {what} does not fit {spec.describe()} (expected {spec.numel} elements, got {numel})"
        )
