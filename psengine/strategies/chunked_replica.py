"""A replica's tensors as the chunks that servers hold, and the memory their bytes leave from and land in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from psengine.buckets import Bucket, is_non_overlapping_and_dense
from psengine.client.partition import CHUNK_BYTES, cut
from psengine.errors import ConfigurationError
from psengine.protocol.layout import ChunkKind, ChunkSpec
from psengine.strategies.base import Replica

USAGE_NAME = "psengine/used parameters"


class TensorImage:
    """A tensor's elements in the order they lie in memory, as a flat CPU tensor that bytes can be sent from or land in.

    A dense CPU tensor is its own image. Others (on a GPU, or with gaps) have a copy: ``refresh`` before reading it,
    ``write_back`` after bytes landed.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._is_dense = is_non_overlapping_and_dense(tensor)
        self.strides = tuple(tensor.stride()) if self._is_dense else tuple(torch.empty(tensor.shape).stride())
        self._address = -1
        self._flat = torch.empty(0)

    def flat(self) -> torch.Tensor:
        """1-D, on the CPU, of the tensor's numel."""
        tensor = self.tensor
        if tensor.data_ptr() != self._address:
            # First asked, or somebody gave the parameter other memory.
            self._address = tensor.data_ptr()
            if self._is_alias:
                self._flat = self._in_memory_order()
            else:
                self._flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
        return self._flat

    @property
    def _is_alias(self) -> bool:
        return self._is_dense and self.tensor.device.type == "cpu"

    def _in_memory_order(self) -> torch.Tensor:
        return self.tensor.detach().as_strided((self.tensor.numel(),), (1,))

    def refresh(self) -> None:
        """Let the image be what the tensor is."""
        flat = self.flat()
        if not self._is_alias:
            flat.copy_(self._in_memory_order() if self._is_dense else self.tensor.detach().reshape(-1))

    def write_back(self) -> None:
        """Let the tensor be what the image is."""
        if self._is_alias:
            return
        if self._is_dense:
            self._in_memory_order().copy_(self._flat)
        else:
            self.tensor.detach().copy_(self._flat.view(self.tensor.shape))


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
            if bucket.sparse:
                raise ConfigurationError(
                    f"parameter servers exchange dense gradients (expected sparse=False, got sparse gradients of"
                    f" {bucket.names[0]!r}). Fix: torch.nn.Embedding(..., sparse=False), or strategy='sync'."
                )
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
        """Look buffers up anew: a module may have assigned others."""
        for name, tensor in self._replica.buffers().items():
            image = self._images.get(name)
            if image is not None and image.tensor is not tensor:
                self._images[name] = TensorImage(tensor.detach())

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
