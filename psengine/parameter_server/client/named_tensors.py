"""Tensors by name, as a job's chunks see them: which run of which tensor lies where in which chunk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from psengine.errors import ConfigurationError
from psengine.parameter_server.client.partition import CHUNK_BYTES, TensorDescription, cut
from psengine.protocol.layout import ChunkKind, ChunkSpec
from psengine.tensors.bucket import is_non_overlapping_and_dense


@dataclass(frozen=True, slots=True)
class Description:
    """One tensor of a job."""

    kind: ChunkKind
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def empty(self) -> torch.Tensor:
        """A new tensor like it, on the CPU."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype)


def describe(tensors: Mapping[str, torch.Tensor], kinds: Mapping[str, ChunkKind]) -> list[ChunkSpec]:
    """The chunks of these tensors: grouped by kind and dtype, in the order given. Those without elements stay out."""
    groups: dict[tuple[ChunkKind, torch.dtype], list[TensorDescription]] = {}
    for name, tensor in tensors.items():
        strides = tensor.stride() if is_non_overlapping_and_dense(tensor) else torch.empty(tensor.shape).stride()
        row = groups.setdefault((kinds[name], tensor.dtype), [])
        row.append((name, tuple(tensor.shape), tuple(strides), tensor.numel()))
    specs: list[ChunkSpec] = []
    for (kind, dtype), row in groups.items():
        specs.extend(cut(kind, row, dtype, len(specs), CHUNK_BYTES))
    return specs


class NamedTensors:
    """The tensors that a job's chunks are made of.

    Attributes:
        specs: the chunks.
        descriptions: name -> what the tensor is.
    """

    def __init__(self, specs: Sequence[ChunkSpec]) -> None:
        self.specs = list(specs)
        self.descriptions = {
            segment.name: Description(spec.kind, spec.dtype, segment.shape, segment.strides)
            for spec in specs
            for segment in spec.segments
        }

    def check(self, tensors: Mapping[str, torch.Tensor], what: str) -> None:
        """Raise ConfigurationError, by name, for tensors the job does not know or that differ from its own."""
        for name, tensor in tensors.items():
            known = self.descriptions.get(name)
            if known is None:
                if tensor.numel() == 0:
                    continue
                names = ", ".join(sorted(self.descriptions)[:8])
                raise ConfigurationError(
                    f"{what} {name!r} is no tensor of this job (expected one of its {len(self.descriptions)}: {names},"
                    " ...)"
                )
            if tuple(tensor.shape) != known.shape or tensor.dtype is not known.dtype:
                raise ConfigurationError(
                    f"{what} {name!r} does not fit (expected shape {known.shape} of {known.dtype}, got"
                    f" {tuple(tensor.shape)} of {tensor.dtype})"
                )

    def chunks_of(self, names: Iterable[str]) -> list[ChunkSpec]:
        """The chunks in which any of these tensors lies."""
        wanted = set(names)
        return [spec for spec in self.specs if any(segment.name in wanted for segment in spec.segments)]

    def payload(
        self, spec: ChunkSpec, tensors: Mapping[str, torch.Tensor], default: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """The chunk's elements: of ``tensors``, else of ``default``, else zeros; a new 1-D tensor on the CPU."""
        parts = []
        for segment in spec.segments:
            tensor = tensors.get(segment.name, default.get(segment.name))
            if tensor is None:
                parts.append(torch.zeros(segment.numel, dtype=spec.dtype))
            else:
                parts.append(self._flat(segment.name, tensor)[segment.start : segment.start + segment.numel])
        return torch.cat(parts)

    def _flat(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's elements in the order the job has them, on the CPU: a view where that is possible."""
        known = self.descriptions[name]
        tensor = tensor.detach()
        if tensor.device.type != "cpu" or tensor.stride() != known.strides:
            tensor = known.empty().copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))

    def landing(self, names: Iterable[str], into: Mapping[str, torch.Tensor]) -> Landing:
        """Where the values of these tensors may arrive: in ``into`` itself, or in new tensors."""
        targets: dict[str, torch.Tensor] = {}
        for name in names:
            known, wanted = self.descriptions[name], into.get(name)
            is_direct = wanted is not None and wanted.device.type == "cpu" and wanted.stride() == known.strides
            targets[name] = wanted.detach() if is_direct and wanted is not None else known.empty()
        return Landing(targets, into)


class Landing:
    """Tensors on their way in.

    Args:
        targets: name -> tensor in the job's memory order, on the CPU.
        into: name -> tensor that is to have the values at last.
    """

    def __init__(self, targets: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> None:
        self._targets = targets
        self._into = into

    def destinations(self, spec: ChunkSpec) -> list[torch.Tensor]:
        """Where the chunk's elements go, in order; what nobody wants goes to memory that is dropped."""
        parts = []
        for segment in spec.segments:
            target = self._targets.get(segment.name)
            if target is None:
                parts.append(torch.empty(segment.numel, dtype=spec.dtype))
            else:
                parts.append(target.as_strided((segment.numel,), (1,), target.storage_offset() + segment.start))
        return parts

    def finish(self) -> dict[str, torch.Tensor]:
        """All values are there: copy to where they could not arrive at once; name -> tensor."""
        result: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, target in self._targets.items():
                wanted = self._into.get(name)
                if wanted is not None and wanted.data_ptr() != target.data_ptr():
                    wanted.copy_(target)
                result[name] = target if wanted is None else wanted
        return result
