"""Tensors and their chunks: how tensors are cut, and their elements in the order that servers keep.

The same tensors give the same cut on every worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from psengine.errors import ConfigurationError
from psengine.kernels import ops
from psengine.protocol.layout import OTHER_NAMES, ChunkKind, ChunkSpec, Segment
from psengine.protocol.messages import DTYPE_NUMBERS, MAX_SEGMENTS

# Smaller chunks overlap better with backward and cost more messages; larger ones stall behind each other.
CHUNK_BYTES = 1024 * 1024
# With several servers each link carries many streams at once, and a worker waits for the slowest of them (link.py).
CHUNK_BYTES_OF_SEVERAL_SERVERS = 256 * 1024

# Tensors are cut at multiples of this many elements, which are whole cache lines: torch's kernels round the rest of a
# vector in another way.
ALIGNMENT_NUMEL = 64

# Of a chunk's description in a body; a page of CHUNKS has 48 KiB.
MAX_DESCRIPTION_BYTES = 40 * 1024

TensorDescription = tuple[str, tuple[int, ...], tuple[int, ...], int]


def cut(
    kind: ChunkKind,
    tensors: Sequence[TensorDescription],
    dtype: torch.dtype,
    first_key: int,
    chunk_bytes: int = CHUNK_BYTES,
) -> list[ChunkSpec]:
    """Lay tensors flat, one after the other, and cut them into chunks of about equal size.

    Args:
        kind: what the tensors are.
        tensors: (name, shape, strides in elements, numel) each, in order; those without elements are left out.
        dtype: of all of them.
        first_key: key of the first chunk; the others follow.
        chunk_bytes: most bytes in a chunk, from one element to MAX_PAYLOAD_BYTES.

    Returns:
        The chunks in order. Each has at most MAX_SEGMENTS segments and a description that fits a message's body.

    Raises:
        ConfigurationError: the dtype cannot travel.
    """
    if dtype not in DTYPE_NUMBERS:
        names = ", ".join(str(known).removeprefix("torch.") for known in DTYPE_NUMBERS)
        raise ConfigurationError(f"tensors of this dtype cannot travel (expected one of {names}, got {dtype})")
    total_numel = sum(numel for _, _, _, numel in tensors)
    limit_numel = _even_limit(total_numel, max(1, chunk_bytes // dtype.itemsize))
    aligned_numel = min(limit_numel, ALIGNMENT_NUMEL)
    runs: list[list[Segment]] = []
    room_numel = room_bytes = 0
    for name, shape, strides, numel in tensors:
        # At most, in msgpack: 9 per number, 5 per head of a container or a string.
        start, segment_bytes = 0, len(name.encode()) + 9 * (2 * len(shape) + 2) + 20
        while start < numel:
            if numel - start > room_numel:
                room_numel -= room_numel % aligned_numel
            if not room_numel or room_bytes < segment_bytes or len(runs[-1]) >= MAX_SEGMENTS:
                runs.append([])
                room_numel, room_bytes = limit_numel, MAX_DESCRIPTION_BYTES
            taken = min(numel - start, room_numel)
            runs[-1].append(Segment(name, tuple(shape), tuple(strides), start, taken))
            start, room_numel, room_bytes = start + taken, room_numel - taken, room_bytes - segment_bytes
    return [
        ChunkSpec(first_key + index, kind, dtype, sum(segment.numel for segment in run), tuple(run))
        for index, run in enumerate(runs)
    ]


def _even_limit(total_numel: int, most_numel: int) -> int:
    """Elements per chunk: as few chunks as ``most_numel`` allows, about equally large, cut on aligned elements."""
    if most_numel <= ALIGNMENT_NUMEL:
        return most_numel
    aligned_numel = most_numel // ALIGNMENT_NUMEL * ALIGNMENT_NUMEL
    chunks = max(1, -(-total_numel // aligned_numel))
    even_numel = -(-total_numel // chunks)
    return max(ALIGNMENT_NUMEL, -(-even_numel // ALIGNMENT_NUMEL) * ALIGNMENT_NUMEL)


class TensorImage:
    """A tensor's elements in the servers' order, as a flat CPU tensor to send from or to receive into.

    The servers' order is given by ``strides``, by default those of the tensor now. While a CPU tensor has these
    strides, it is its own image. Other tensors (on a GPU, with gaps, changed to another memory format since) have a
    copy: call ``refresh`` before reading it, and ``write_back`` after writing to it.
    """

    def __init__(self, tensor: torch.Tensor, strides: tuple[int, ...] | None = None) -> None:
        self.tensor = tensor
        if strides is None:
            is_dense = ops.is_dense(tensor.shape, tensor.stride())
            strides = tuple(tensor.stride()) if is_dense else tuple(torch.empty(tensor.shape).stride())
        self.strides = strides
        self._copy: torch.Tensor | None = None

    @property
    def is_alias(self) -> bool:
        """Whether the image is the tensor's own memory."""
        tensor = self.tensor
        lies_alike = all(
            size == 1 or now == then
            for size, now, then in zip(tensor.shape, tensor.stride(), self.strides, strict=True)
        )
        return lies_alike and tensor.device.type == "cpu"

    def flat(self) -> torch.Tensor:
        """1-D, on the CPU, of the tensor's numel."""
        tensor = self.tensor.detach()
        if self.is_alias:
            return tensor.as_strided((tensor.numel(),), (1,))
        if self._copy is None:
            self._copy = torch.empty(tensor.numel(), dtype=tensor.dtype)
        return self._copy

    def refresh(self) -> None:
        """Copy the tensor to its image."""
        if not self.is_alias:
            self.flat().as_strided(self.tensor.shape, self.strides).copy_(self.tensor.detach())

    def write_back(self) -> None:
        """Copy the image to its tensor."""
        if not self.is_alias:
            self.tensor.detach().copy_(self.flat().as_strided(self.tensor.shape, self.strides))


def cut_images(
    kind: ChunkKind, images: Mapping[str, TensorImage], dtype: torch.dtype, first_key: int, *, servers: int
) -> list[ChunkSpec]:
    """The chunks, at so many ``servers``, of tensors of one dtype, in the order given; see ``cut``."""
    rows = [(name, tuple(image.tensor.shape), image.strides, image.tensor.numel()) for name, image in images.items()]
    return cut(kind, rows, dtype, first_key, CHUNK_BYTES if servers == 1 else CHUNK_BYTES_OF_SEVERAL_SERVERS)


def parts_of(spec: ChunkSpec, images: Mapping[str, TensorImage]) -> list[torch.Tensor]:
    """The memory of a chunk's elements: flat CPU tensors that tile it in order; new zeros where there is no image."""
    return [
        images[segment.name].flat()[segment.start : segment.start + segment.numel]
        if segment.name in images
        else torch.zeros(segment.numel, dtype=spec.dtype)
        for segment in spec.segments
    ]


class NamedTensors:
    """The tensors of a job's chunks, for a client that brings tensors by name.

    Attributes:
        specs: the chunks.
        names: of the tensors.
    """

    def __init__(self, specs: Sequence[ChunkSpec]) -> None:
        self.specs = list(specs)
        self._known = {segment.name: (spec.dtype, segment) for spec in specs for segment in spec.segments}
        self.names = [name for name in self._known if name != OTHER_NAMES]

    def check(self, tensors: Mapping[str, torch.Tensor], what: str) -> None:
        """Raise ConfigurationError for tensors that the job does not have or that differ from its own."""
        for name, tensor in tensors.items():
            if name not in self._known:
                if tensor.numel() == 0:
                    continue  # travels in no chunk
                names = ", ".join(sorted(self.names)[:8])
                raise ConfigurationError(
                    f"{what} {name!r} is no tensor of this job (expected one of its {len(self.names)}: {names}, ...)"
                )
            dtype, known = self._known[name]
            if tuple(tensor.shape) != known.shape or tensor.dtype is not dtype:
                raise ConfigurationError(
                    f"{what} {name!r} does not fit (expected shape {known.shape} of {dtype}, got"
                    f" {tuple(tensor.shape)} of {tensor.dtype})"
                )

    def chunks_of(self, names: Iterable[str]) -> list[ChunkSpec]:
        """The chunks that hold any of these tensors."""
        wanted = set(names)
        return [spec for spec in self.specs if any(segment.name in wanted for segment in spec.segments)]

    def to_send(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorImage]:
        """Images that hold these tensors' elements now."""
        images = self.to_receive(tensors, tensors)
        for image in images.values():
            image.refresh()
        return images

    def to_receive(self, names: Iterable[str], into: Mapping[str, torch.Tensor]) -> dict[str, TensorImage]:
        """Images to receive into: of the tensors ``into``, or of new ones on the CPU."""
        images = {}
        for name in names:
            if name in self._known:
                dtype, known = self._known[name]
                tensor = into[name] if name in into else torch.empty_strided(known.shape, known.strides, dtype=dtype)
                images[name] = TensorImage(tensor, known.strides)
        return images


def received(images: Mapping[str, TensorImage]) -> dict[str, torch.Tensor]:
    """The tensors of images whose elements have arrived."""
    for image in images.values():
        image.write_back()
    return {name: image.tensor for name, image in images.items()}
