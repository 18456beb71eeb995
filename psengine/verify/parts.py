"""``Part``: elements of a parameter, counted in the order in which they lie in memory; and tensors in that order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Part(NamedTuple):
    """Elements ``first`` to ``first + numel`` of the parameter ``name``."""

    name: str
    first: int
    numel: int


def whole(names: Iterable[str], module: torch.nn.Module) -> list[Part]:
    """All elements of these parameters."""
    return [Part(name, 0, module.get_parameter(name).numel()) for name in names]


def in_memory_order(flat: Tensor, parameter: Tensor) -> Tensor:
    """``flat``, in the shape of the parameter, and laid out as it is if it has no gaps."""
    dense = torch.empty_like(parameter)  # keeps strides that have neither gaps nor overlaps
    return flat.as_strided(parameter.shape, dense.stride())


def elements(tensor: Tensor | None, parameter: Tensor) -> Tensor:
    """A copy of ``tensor``, 1-D, in the order of ``parameter``; of None zeros."""
    flat = torch.zeros(parameter.numel(), dtype=parameter.dtype)
    if tensor is not None:
        in_memory_order(flat, parameter).copy_(tensor.detach())
    return flat


def gather(flats: Mapping[str, Tensor], parts: Sequence[Part]) -> Tensor:
    """A copy of the parts, one after the other; ``flats`` are ``elements`` by name."""
    return torch.cat([flats[name][first : first + numel] for name, first, numel in parts])


def scatter(values: Tensor, parts: Sequence[Part], flats: Mapping[str, Tensor]) -> None:
    """Inverse of ``gather``: write to ``flats``."""
    for (name, first, numel), piece in zip(parts, values.split([part.numel for part in parts]), strict=True):
        flats[name][first : first + numel] = piece


def row_numel(parameter: Tensor) -> int:
    """Elements of each row of a matrix with a row for each element of the outermost dimension; of a vector 0."""
    if parameter.dim() < 2:
        return 0
    strides = torch.empty_like(parameter).stride()
    outermost = max(range(parameter.dim()), key=lambda dimension: (strides[dimension], -dimension))
    return math.prod(parameter.shape) // max(1, parameter.shape[outermost])


def pieces_of(parts: Sequence[Part], module: torch.nn.Module) -> list[tuple[int, int]]:
    """Of each part the number of elements, and ``row_numel``."""
    return [(part.numel, row_numel(module.get_parameter(part.name))) for part in parts]
