"""Tensors in the element order that servers keep, and the runs of them that lie in each chunk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from psengine.errors import ConfigurationError
from psengine.parameter_server.client.partition import CHUNK_BYTES, cut
from psengine.protocol.layout import ChunkKind, ChunkSpec
from psengine.tensors.bucket import is_non_overlapping_and_dense


class TensorImage:
    """A tensor's elements in the servers' order, as a flat CPU tensor to send from or to receive into.

    The servers' order is given by ``strides``, by default those of the tensor now. While a CPU tensor has these
    strides, it is its own image. Other tensors (on a GPU, with gaps, changed to another memory format since) have a
    copy: call ``refresh`` before reading it, and ``write_back`` after writing to it.
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
        tensor = self.tensor
        if not self.is_alias:
            if self._address != -2:
                self._address, self._flat = -2, torch.empty(tensor.numel(), dtype=tensor.dtype)
        elif tensor.data_ptr() != self._address:
            # The first call, or the parameter was given other memory.
            self._address = tensor.data_ptr()
            self._flat = tensor.detach().as_strided((tensor.numel(),), (1,))
        return self._flat

    def _ordered(self) -> torch.Tensor:
        """The copy, seen in the tensor's shape."""
        return self._flat.as_strided(self.tensor.shape, self.strides)

    def refresh(self) -> None:
        """Copy the tensor to its image."""
        self.flat()
        if not self.is_alias:
            self._ordered().copy_(self.tensor.detach())

    def write_back(self) -> None:
        """Copy the image to its tensor."""
        if not self.is_alias:
            self.tensor.detach().copy_(self._ordered())


def cut_images(
    kind: ChunkKind, images: Mapping[str, TensorImage], dtype: torch.dtype, first_key: int
) -> list[ChunkSpec]:
    """The chunks of tensors of one dtype, in the order given; see ``partition.cut``."""
    rows = [(name, tuple(image.tensor.shape), image.strides, image.tensor.numel()) for name, image in images.items()]
    return cut(kind, rows, dtype, first_key, CHUNK_BYTES)


def parts_of(spec: ChunkSpec, images: Mapping[str, TensorImage]) -> list[torch.Tensor]:
    """The memory of a chunk's elements: flat CPU tensors that tile it in order; new zeros where there is no image."""
    return [
        images[segment.name].flat()[segment.start : segment.start + segment.numel]
        if segment.name in images
        else torch.zeros(segment.numel, dtype=spec.dtype)
        for segment in spec.segments
    ]


@dataclass(frozen=True, slots=True)
class _Description:
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class NamedTensors:
    """The tensors of a job's chunks, for a client that brings tensors by name.

    Attributes:
        specs: the chunks.
        names: of the tensors.
    """

    def __init__(self, specs: Sequence[ChunkSpec]) -> None:
        self.specs = list(specs)
        self._known = {
            segment.name: _Description(spec.dtype, segment.shape, segment.strides)
            for spec in specs
            for segment in spec.segments
        }
        self.names = list(self._known)

    def check(self, tensors: Mapping[str, torch.Tensor], what: str) -> None:
        """Raise ConfigurationError for tensors that the job does not have or that differ from its own."""
        for name, tensor in tensors.items():
            known = self._known.get(name)
            if known is None:
                if tensor.numel() == 0:
                    continue  # travels in no chunk
                names = ", ".join(sorted(self.names)[:8])
                raise ConfigurationError(
                    f"{what} {name!r} is no tensor of this job (expected one of its {len(self.names)}: {names}, ...)"
                )
            if tuple(tensor.shape) != known.shape or tensor.dtype is not known.dtype:
                raise ConfigurationError(
                    f"{what} {name!r} does not fit (expected shape {known.shape} of {known.dtype}, got"
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
            known = self._known.get(name)
            if known is not None:
                tensor = into.get(name)
                if tensor is None:
                    tensor = torch.empty_strided(known.shape, known.strides, dtype=known.dtype)
                images[name] = TensorImage(tensor, known.strides)
        return images


def received(images: Mapping[str, TensorImage]) -> dict[str, torch.Tensor]:
    """The tensors of images whose elements have arrived."""
    for image in images.values():
        image.write_back()
    return {name: image.tensor for name, image in images.items()}
