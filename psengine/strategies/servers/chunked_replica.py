"""A replica's tensors as the chunks that servers hold, and the memory their bytes leave from and land in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from psengine.errors import ReplicaMismatchError
from psengine.kernels import ops
from psengine.parameter_server.client.partition import TensorImage, cut, cut_images, parts_of
from psengine.protocol.layout import ChunkKind, ChunkSpec
from psengine.strategies.life_cycle import Replica
from psengine.tensors.bucket import Bucket

USAGE_NAME = "psengine/used parameters"


@dataclass(frozen=True, slots=True)
class _Places:
    """Where a chunk's values go: parts that tile it in order, their layout, and tensors that need a copy."""

    parts: list[torch.Tensor]
    layout: torch.Tensor
    copied: list[str]


class ChunkedReplica:
    """The chunks of a replica: its buckets' parameters first, then buffers and frozen parameters.

    Args:
        replica: as given to ``Strategy.prepare``.
        buckets: the reducer's; dense.
        servers: how many hold the chunks.
        counts_usage: whether to have a chunk for the map of used parameters.

    Attributes:
        specs: all chunks, by key.
        of_bucket: per bucket its chunks as (spec, start, end), which tile the bucket's flat memory in order.
        buffers: keys of the chunks of buffers.
        usage: key of the usage map, None without one.
    """

    def __init__(self, replica: Replica, buckets: Sequence[Bucket], *, servers: int, counts_usage: bool) -> None:
        self.specs: list[ChunkSpec] = []
        self.of_bucket: list[list[tuple[ChunkSpec, int, int]]] = []
        self._replica = replica
        self._servers = servers
        self._parameters = list(replica.parameters.values())
        # Where these lie, and what ``load`` found then.
        self._lie: list[tuple[int, tuple[int, ...]]] = []
        self._places: dict[int, _Places] = {}
        self._images = {name: TensorImage(parameter) for name, parameter in replica.parameters.items()}
        for bucket in buckets:
            assert not bucket.sparse, "ServerStrategy.prepare refuses sparse gradients"
            specs = self._add(ChunkKind.PARAMETER, bucket.names, bucket.dtype)
            ends = [0]
            for spec in specs:
                ends.append(ends[-1] + spec.numel)
            self.of_bucket.append(list(zip(specs, ends, ends[1:], strict=False)))
        self.buffers = self._add_state(ChunkKind.BUFFER, set(replica.buffers()))
        frozen = {name for name in replica.state if name not in replica.parameters and name not in replica.buffers()}
        self._add_state(ChunkKind.CONSTANT, frozen)
        self.usage: int | None = None
        if counts_usage:
            self.usage = len(self.specs)
            count = len(replica.parameters)
            self.specs.extend(cut(ChunkKind.USAGE, [(USAGE_NAME, (count,), (1,), count)], torch.int32, self.usage))

    def _add(self, kind: ChunkKind, names: Sequence[str], dtype: torch.dtype) -> list[ChunkSpec]:
        images = {name: self._images[name] for name in names}
        specs = cut_images(kind, images, dtype, len(self.specs), servers=self._servers)
        self.specs.extend(specs)
        return specs

    def _add_state(self, kind: ChunkKind, names: set[str]) -> list[int]:
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, tensor in self._replica.state.items():
            if name in names:
                self._images[name] = TensorImage(tensor)
                by_dtype.setdefault(tensor.dtype, []).append(name)
        specs = [spec for dtype, group in by_dtype.items() for spec in self._add(kind, group, dtype)]
        return [spec.key for spec in specs]

    def follow_buffers(self) -> None:
        """Look buffers up anew: a module may have assigned others.

        Raises:
            ReplicaMismatchError: one has another shape or dtype than when the model was wrapped.
        """
        for name, buffer in self._replica.buffers().items():
            image = self._images.get(name)
            if image is None:
                continue
            known = image.tensor
            if (buffer.shape, buffer.dtype) != (known.shape, known.dtype):
                raise ReplicaMismatchError(
                    f"buffer {name!r} changed since the model was wrapped (expected shape {tuple(known.shape)},"
                    f" {known.dtype}, got {tuple(buffer.shape)}, {buffer.dtype})"
                )
            if buffer.data_ptr() != known.data_ptr() or buffer.stride() != known.stride():
                self._images[name] = TensorImage(buffer.detach(), image.strides)

    def follow_parameters(self) -> None:
        """Before ``load``: a parameter may have been given other memory."""
        lie = [(parameter.data_ptr(), parameter.stride()) for parameter in self._parameters]
        if lie != self._lie:
            self._lie = lie
            self._places.clear()

    def parts(self, spec: ChunkSpec) -> list[torch.Tensor]:
        """The memory of a chunk's values: flat CPU tensors that tile it in order, to land in."""
        return parts_of(spec, self._images)

    def write_back(self, specs: Iterable[ChunkSpec]) -> None:
        """After bytes landed in ``parts``: write images back to their tensors."""
        self.write_images(_names(specs))

    def values(self, spec: ChunkSpec) -> torch.Tensor:
        """A copy of a chunk's values: 1-D, on the CPU."""
        for name in _names([spec]):
            self._images[name].refresh()
        return torch.cat(self.parts(spec))

    def load(self, specs: Sequence[ChunkSpec], values: Sequence[torch.Tensor]) -> set[str]:
        """Overwrite chunks by their ``values``: 1-D, on the CPU. Returns the names for ``write_images``."""
        copied: set[str] = set()
        for spec, flat in zip(specs, values, strict=True):
            places = self._places.get(spec.key)
            if places is None:
                places = self._find_places(spec)
            ops.unpack_(places.parts, flat, 1.0, places.layout)
            # Older graphs and other models may depend on the old values.
            torch.autograd.graph.increment_version(places.parts)
            copied.update(places.copied)
        return copied

    def write_images(self, names: Iterable[str]) -> None:
        """Write images back to their tensors."""
        for name in names:
            self._images[name].write_back()

    def _find_places(self, spec: ChunkSpec) -> _Places:
        parts = self.parts(spec)
        copied = [name for name in _names([spec]) if not self._images[name].is_alias]
        places = _Places(parts, ops.layout_of(parts), copied)
        if spec.kind is ChunkKind.PARAMETER:
            self._places[spec.key] = places
        return places


def _names(specs: Iterable[ChunkSpec]) -> dict[str, None]:
    return {segment.name: None for spec in specs if spec.kind is not ChunkKind.USAGE for segment in spec.segments}
