"""A replica's tensors as the chunks that servers hold, and the memory their bytes leave from and land in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from psengine.errors import ReplicaMismatchError
from psengine.parameter_server.client.partition import CHUNK_BYTES, cut
from psengine.protocol.layout import ChunkKind, ChunkSpec
from psengine.strategies.life_cycle import Replica
from psengine.tensors.bucket import Bucket, is_non_overlapping_and_dense

USAGE_NAME = "psengine/used parameters"


class TensorImage:
    """A tensor's elements in the order the servers keep them, as a flat CPU tensor to send from or to land in.

    That order is the one in which they lay in memory when the model was wrapped (``strides``). As long as a CPU tensor
    lies so, it is its own image. Others (on a GPU, with gaps, moved to another memory format since) have a copy:
    ``refresh`` before reading it, ``write_back`` after bytes landed.
    """

    def __init__(self, tensor: torch.Tensor, strides: tuple[int, ...] | None = None) -> None:
        self.tensor = tensor
        if strides is None:
            is_dense = is_non_overlapping_and_dense(tensor)
            strides = tuple(tensor.stride()) if is_dense else tuple(torch.empty(tensor.shape).stride())
        self.strides = strides
        self._address = -1
        self._flat = torch.empty(0)

    @property
    def _is_alias(self) -> bool:
        tensor = self.tensor
        lies_alike = all(
            size == 1 or now == then
            for size, now, then in zip(tensor.shape, tensor.stride(), self.strides, strict=True)
        )
        return lies_alike and tensor.device.type == "cpu"

    def flat(self) -> torch.Tensor:
        """1-D, on the CPU, of the tensor's numel."""
        tensor = self.tensor
        if not self._is_alias:
            if self._address != -2:
                self._address, self._flat = -2, torch.empty(tensor.numel(), dtype=tensor.dtype)
        elif tensor.data_ptr() != self._address:
            # First asked, or somebody gave the parameter other memory.
            self._address = tensor.data_ptr()
            self._flat = tensor.detach().as_strided((tensor.numel(),), (1,))
        return self._flat

    def _ordered(self) -> torch.Tensor:
        """The copy, seen in the tensor's shape."""
        return self._flat.as_strided(self.tensor.shape, self.strides)

    def refresh(self) -> None:
        """Let the image be what the tensor is."""
        self.flat()
        if not self._is_alias:
            self._ordered().copy_(self.tensor.detach())

    def write_back(self) -> None:
        """Let the tensor be what the image is."""
        if not self._is_alias:
            self.tensor.detach().copy_(self._ordered())


class ChunkedReplica:
    """The chunks of a replica: its buckets' parameters first, then buffers and frozen parameters.

    Args:
        replica: as given to ``Strategy.prepare``.
        buckets: the reducer's; dense.
        counts_usage: whether to have a chunk for the map of used parameters.

    Attributes:
        specs: all chunks, by key.
        of_bucket: per bucket its chunks as (spec, start, end), which tile the bucket's flat memory in order.
        buffers: keys of the chunks of buffers.
        usage: key of the usage map, None without one.
    """

    def __init__(self, replica: Replica, buckets: Sequence[Bucket], *, counts_usage: bool) -> None:
        self.specs: list[ChunkSpec] = []
        self.of_bucket: list[list[tuple[ChunkSpec, int, int]]] = []
        self._replica = replica
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
        tensors = [
            (name, tuple(image.tensor.shape), image.strides, image.tensor.numel())
            for name, image in ((name, self._images[name]) for name in names)
        ]
        specs = cut(kind, tensors, dtype, len(self.specs), CHUNK_BYTES)
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

    def parts(self, spec: ChunkSpec) -> list[torch.Tensor]:
        """The memory of a chunk's values: flat CPU tensors that tile it in order, to read from or land in."""
        if spec.kind is ChunkKind.USAGE:
            return [torch.zeros(spec.numel, dtype=spec.dtype)]
        return [
            self._images[segment.name].flat()[segment.start : segment.start + segment.numel]
            for segment in spec.segments
        ]

    def refresh(self, specs: Iterable[ChunkSpec]) -> None:
        """Before reading ``parts``: make images of tensors that are not their own."""
        for name in _names(specs):
            self._images[name].refresh()

    def write_back(self, specs: Iterable[ChunkSpec]) -> None:
        """After bytes landed in ``parts``: write images back to their tensors."""
        for name in _names(specs):
            self._images[name].write_back()

    def values(self, spec: ChunkSpec) -> torch.Tensor:
        """A copy of a chunk's values: 1-D, on the CPU."""
        self.refresh([spec])
        return torch.cat(self.parts(spec))

    def assign(self, spec: ChunkSpec, values: torch.Tensor) -> None:
        """Overwrite a chunk's tensors by ``values``: 1-D, on the CPU."""
        parts = self.parts(spec)
        for part, piece in zip(parts, values.split([part.numel() for part in parts]), strict=True):
            part.copy_(piece)
        self.write_back([spec])

    def segment_indices(self, spec: ChunkSpec, names: set[str]) -> list[int]:
        """Which segments of a chunk belong to the tensors called ``names``."""
        return [index for index, segment in enumerate(spec.segments) if segment.name in names]


def _names(specs: Iterable[ChunkSpec]) -> dict[str, None]:
    return {segment.name: None for spec in specs if spec.kind is not ChunkKind.USAGE for segment in spec.segments}
