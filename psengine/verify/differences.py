"""Compare two tensors: equal to the bit or within a tolerance, and where they differ most."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._comparison import default_tolerances

# In the order in which a step computes them: the first difference is the earliest.
KINDS = ("loss", "buffer", "gradient", "parameter")
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far apart two numbers may be: ``absolute + relative * largest``; ``torch.testing``'s if both are None.

    ``largest`` is the largest magnitude in the reference's tensor: a sum in another order has a rounding error in
    proportion to its terms, not to the sum.
    """

    relative: float | None = None
    absolute: float | None = None

    def of(self, dtype: torch.dtype) -> tuple[float, float]:
        """(relative, absolute) for ``dtype``; integers have none of their own."""
        if self.relative is None and self.absolute is None:
            return default_tolerances(dtype)
        # As in torch.testing, if one is given, the default of the other is 0.
        return self.relative or 0.0, self.absolute or 0.0


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How two tensors differ.

    Attributes:
        step: after which step, counted from 0; -1 is the state before the first.
        rank: on which rank.
        kind: "loss", "buffer", "gradient" or "parameter".
        name: of the parameter or buffer, as ``named_parameters`` has it; "" for the loss.
        place: of the tensor among those of its kind.
        absolute: the largest difference of two numbers; infinite where only one is finite, or only one tensor exists.
        relative: the largest difference in proportion to the larger of the two magnitudes.
        index: of the number with the largest absolute difference.
        candidate, reference: that number in either training; None where there is no such number.
        differing, numel: how many numbers differ, of how many.
        within: whether all are within the tolerance.
        note: what is different about the tensors themselves (shape, dtype, strides, absence), else "".
    """

    step: int
    rank: int
    kind: str
    name: str
    place: int
    absolute: float
    relative: float
    index: tuple[int, ...] = ()
    candidate: float | None = None
    reference: float | None = None
    differing: int = 1
    numel: int = 1
    within: bool = False
    note: str = ""

    @property
    def where(self) -> str:
        """Such as "at step 3, gradient of 0.weight, rank 1"."""
        step = "before the first step" if self.step < 0 else f"at step {self.step}"
        link = " of " if self.kind == "gradient" else " " if self.name else ""
        return f"{step}, {self.kind}{link}{self.name}, rank {self.rank}"

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Earlier differences come first."""
        return self.step, KINDS.index(self.kind), self.place, self.rank


def find_difference(
    candidate: torch.Tensor | None, reference: torch.Tensor | None, tolerance: Tolerance, **where: Any
) -> Difference | None:
    """Return how the tensors differ, or None where they are bitwise equal.

    NaN equals NaN, whatever its payload. 0 and -0 differ by nothing, but are not bitwise equal; nor are equal numbers
    in another memory layout. Sparse tensors are coalesced first. ``where``: the difference's step, rank, kind, name and
    place.
    """
    make = functools.partial(Difference, **where)
    if candidate is None and reference is None:
        return None
    if candidate is None or reference is None:
        missing = "candidate" if candidate is None else "reference"
        return make(absolute=math.inf, relative=math.inf, note=f"None in the {missing} alone")
    for what in ("shape", "dtype", "layout"):
        ours, theirs = getattr(candidate, what), getattr(reference, what)
        if ours != theirs:
            ours, theirs = (tuple(size) if what == "shape" else size for size in (ours, theirs))
            note = f"{what} {ours} in the candidate, {theirs} in the reference"
            return make(absolute=math.inf, relative=math.inf, note=note)
    ours, theirs = _plain(candidate), _plain(reference)
    if ours.numel() == 0 or torch.equal(_bits(ours), _bits(theirs)):
        if _significant_strides(candidate) == _significant_strides(reference):
            return None
        note = f"strides {candidate.stride()} in the candidate, {reference.stride()} in the reference"
        return make(absolute=0.0, relative=0.0, differing=0, numel=ours.numel(), within=True, note=note)
    differs = _bits(ours) != _bits(theirs)
    if ours.is_floating_point():
        differs &= ~(ours.isnan() & theirs.isnan())
    if not bool(differs.any()):
        return None
    a, b = ours[differs], theirs[differs]
    absolute, relative = _distances(a, b)
    worst = int(absolute.argmax())
    relative_tolerance, absolute_tolerance = tolerance.of(candidate.dtype)
    magnitudes = theirs.double().abs().nan_to_num(nan=0.0, posinf=0.0)
    allowed = absolute_tolerance + relative_tolerance * float(magnitudes.max())
    return make(
        absolute=float(absolute[worst]),
        relative=float(relative.max()),
        index=tuple(differs.nonzero()[worst].tolist())[: candidate.dim()],
        candidate=float(a[worst]),
        reference=float(b[worst]),
        differing=len(a),
        numel=ours.numel(),
        # An infinite difference is beyond every tolerance.
        within=bool(((absolute <= allowed) & absolute.isfinite()).all()),
    )


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` holds neither NaN nor infinity."""
    values = tensor.detach()
    return bool((values.coalesce().values() if values.is_sparse else values.to_dense()).isfinite().all())


def _significant_strides(tensor: torch.Tensor) -> list[int]:
    """Strides of the dimensions that have more than one element."""
    if tensor.layout != torch.strided:
        return []
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A dense real tensor, on the CPU."""
    tensor = tensor.detach().to_dense().cpu()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.bool else tensor.view(_INTEGER_OF_SIZE[tensor.element_size()])


def _distances(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Absolute and relative distance of each pair, in float64; infinite where exactly one is finite or a number."""
    ours, theirs = a.double(), b.double()
    if a.is_floating_point():
        absolute = (ours - theirs).abs().masked_fill(ours == theirs, 0.0)
    else:
        # Different integers above 2**53 may be equal as float64.
        absolute = (ours - theirs).abs().clamp(min=1.0)
    absolute = absolute.nan_to_num(nan=math.inf, posinf=math.inf)
    relative = (absolute / torch.maximum(ours.abs(), theirs.abs())).masked_fill(absolute == 0, 0.0)
    return absolute, relative.nan_to_num(nan=math.inf, posinf=math.inf)
