"""The average of values, one of each replica, as a collective or a server makes it.

over a collective   share ─ + residual ─ what arrives ─┐                     residual: what does not
                    share ─ + residual ─ what arrives ─┴─► sum ─ + residual ─ what arrives ─► the average of all
at a server         values ─ + residual ─ what arrives ─┐
                    values ─ + residual ─ what arrives ─┴─► sum / W ─ + residual ─ what arrives ─► the average of all

Over a collective casts are summed as they are, and "topk" sends all of the sum.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from oracles.codec_values import REFERENCE_VALUES, Sender, WithFeedback, is_covered, sender
from oracles.payloads import CASTS
from oracles.ring_order import add_in_ring_order
from psengine.codecs.base import Codec

SLICE_NUMEL = 512
# Of the payload of so many values.
SLICE_BYTES = {"int8": 520, "fp4": 272, "onebit": 68}
MOST_BYTES = 256 * 1024


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


class Average:
    """Of values of the same elements, time after time: called with the addends, it returns the average in their dtype.

    ``up``: of each replica what it sends.
    """

    up: Sequence[Sender] = ()

    def lay_out_anew(self) -> None:
        """Its elements will be exchanged with others: all that was left out goes to the residuals of ``up``."""

    def spare(self, first: int, end: int) -> None:
        """What was sent last of these elements did not count."""
        for one in self.up:
            one.spare(first, end)


def _in_rank_order(values: Sequence[Tensor]) -> Tensor:
    """Their sum, added one after the other."""
    total, *others = values
    for one in others:
        total = total + one
    return total


class CastSum(Average):
    """Shares are added in another dtype, in the order of gloo's all-reduce."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, addends: Sequence[Tensor]) -> Tensor:
        payloads = [share.to(self._dtype) for share in addends]
        total = torch.empty_like(payloads[0])
        add_in_ring_order(payloads, total)
        return total.to(addends[0].dtype)


class SlicedAverage(Average):
    """What arrives of each share is added in the order of ranks, and so is what arrives of the sum: owners of slices
    send it. Of "topk" all of the sum arrives.
    """

    def __init__(self, name: str, world_size: int, *, error_feedback: bool = True, **options: Any) -> None:
        arrives = REFERENCE_VALUES[name](**options)
        self.up: Sequence[Sender] = [WithFeedback(arrives, keeps=error_feedback) for _ in range(world_size)]
        self.down = None if name == "topk" else WithFeedback(arrives, keeps=error_feedback)
        self._name = name

    def __call__(self, addends: Sequence[Tensor]) -> Tensor:
        total = _in_rank_order([one(share) for one, share in zip(self.up, addends, strict=True)])
        return (total if self.down is None else self.down(total)).to(addends[0].dtype)

    def lay_out_anew(self) -> None:
        """Owners of slices take what was left out of the sum to their own residuals. A bucket is cut into pieces, and
        each of these into a slice of whole 512 values for each rank, whose payload has at most 256 KiB.
        """
        if self.down is None or self.down.residual is None:
            return
        second, self.down.residual = self.down.residual, None
        row_numel = SLICE_NUMEL * len(self.up)
        rows = max(1, MOST_BYTES // SLICE_BYTES[self._name])
        first = 0
        for piece in second.split(rows * row_numel):
            slices = piece.split(-(-len(piece) // row_numel) * SLICE_NUMEL)
            for part, one in zip(slices, self.up, strict=False):  # the last ranks may have none
                assert one.residual is not None, "shares were sent before their sum"
                one.residual[first : first + len(part)] += part
                first += len(part)

    def spare(self, first: int, end: int) -> None:
        super().spare(first, end)
        if self.down is not None:
            self.down.spare(first, end)


class ServerAverage(Average):
    """What arrives is added in the order of ranks, in float32 at least, and the sum is divided.

    Args:
        codec: of what replicas send.
        answers: whether the average is encoded too.
    """

    def __init__(self, codec: Codec, world_size: int, dtype: torch.dtype, *, answers: bool = True) -> None:
        self.up = [sender(codec, dtype) for _ in range(world_size)]
        self._down = sender(codec, dtype) if answers else Sender(keeps=False)

    def __call__(self, addends: Sequence[Tensor]) -> Tensor:
        dtype = addends[0].dtype
        first, *others = [one(values).to(dtype) for one, values in zip(self.up, addends, strict=True)]
        total = _in_rank_order([first.to(torch.promote_types(dtype, torch.float32)), *others])
        return self._down((total / len(addends)).to(dtype)).to(dtype)


class OverCollective:
    """Shares are rounded before they are added."""

    def addends(self, values: Sequence[Tensor]) -> list[Tensor]:
        return [one * (1.0 / len(values)) for one in values]

    def average(self, codec: Codec, world_size: int, dtype: torch.dtype) -> Average:
        if not is_covered(codec, dtype):
            return CastSum(dtype)
        if codec.name in CASTS:
            return CastSum(CASTS[codec.name])
        return SlicedAverage(codec.name, world_size, **codec.options)


class AtServers:
    """Servers know how many contribute; ``answers``: whether they encode averages."""

    def __init__(self, *, answers: bool = True) -> None:
        self._answers = answers

    def addends(self, values: Sequence[Tensor]) -> list[Tensor]:
        return list(values)

    def average(self, codec: Codec, world_size: int, dtype: torch.dtype) -> Average:
        return ServerAverage(codec, world_size, dtype, answers=self._answers)


Over: TypeAlias = OverCollective | AtServers
