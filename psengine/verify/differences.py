"""Two tensors that should be equal: whether they are, to the bit or within a tolerance, and where they differ most."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

# In the order in which a step computes them, so that the first difference is the earliest.
KINDS = ("loss", "buffer", "gradient", "parameter")
# Relative and absolute; torch.testing.assert_close's.
TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex32: (1e-3, 1e-5),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far apart two numbers may be: ``absolute + relative * largest``; None takes each dtype's own.

    ``largest`` is the largest magnitude in the reference's tensor, because sums in another order round in proportion to
    their terms, however small the sum.
    """

    relative: float | None = None
    absolute: float | None = None

    def of(self, dtype: torch.dtype) -> tuple[float, float]:
        """(relative, absolute) for ``dtype``; integers have none of their own."""
        relative, absolute = TOLERANCES.get(dtype, (0.0, 0.0))
        if self.relative is None and self.absolute is None:
            return relative, absolute
        # As in torch.testing, one that is given leaves nothing of the default.
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
    def what(self) -> str:
        """Such as "gradient of layers.0.weight"."""
        link = " of " if self.kind == "gradient" else " "
        return f"{self.kind}{link}{self.name}" if self.name else self.kind

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Earlier differences come first."""
        return self.step, KINDS.index(self.kind), self.place, self.rank

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON types; numbers that are not finite become their names."""
        return {key: finite_or_name(value) for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Difference:
        """The reverse of ``to_json``."""
        names = ("absolute", "relative", "candidate", "reference")
        numbers = {key: None if fields[key] is None else float(fields[key]) for key in names}
        return cls(**{**fields, **numbers, "index": tuple(fields["index"])})


def finite_or_name(value: Any) -> Any:
    """JSON has no name for infinity and NaN: they become "inf", "-inf" and "nan"."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def find_difference(
    candidate: torch.Tensor | None,
    reference: torch.Tensor | None,
    tolerance: Tolerance,
    *,
    step: int,
    rank: int,
    kind: str,
    name: str,
    place: int,
) -> Difference | None:
    """Return how the tensors differ, or None where they are bitwise equal.

    NaN equals NaN, whatever its payload. 0 and -0 differ by nothing, but are not bitwise equal; nor are equal numbers
    in another memory layout. Sparse tensors are compared as the sums they stand for.
    """
    where: dict[str, Any] = {"step": step, "rank": rank, "kind": kind, "name": name, "place": place}
    if candidate is None or reference is None:
        if candidate is None and reference is None:
            return None
        missing = "candidate" if candidate is None else "reference"
        return Difference(**where, absolute=math.inf, relative=math.inf, note=f"None in the {missing} alone")
    note = _unlike(candidate, reference)
    if note:
        return Difference(**where, absolute=math.inf, relative=math.inf, note=note)
    ours, theirs = _plain_pair(candidate, reference)
    relative_tolerance, absolute_tolerance = tolerance.of(candidate.dtype)
    if ours.numel() == 0 or torch.equal(_bits(ours), _bits(theirs)):
        if _significant_strides(candidate) == _significant_strides(reference):
            return None
        note = f"strides {candidate.stride()} in the candidate, {reference.stride()} in the reference"
        return Difference(**where, absolute=0.0, relative=0.0, differing=0, numel=ours.numel(), within=True, note=note)
    differs = _bits(ours) != _bits(theirs)
    if ours.is_floating_point():
        differs &= ~(ours.isnan() & theirs.isnan())
    differing = int(differs.sum())
    if differing == 0:
        return None
    places = differs.nonzero()
    a, b = ours[differs], theirs[differs]
    absolute, relative = _distances(a, b)
    worst = int(absolute.argmax())
    magnitudes = _real(theirs).abs()
    allowed = absolute_tolerance + relative_tolerance * float(magnitudes.nan_to_num(nan=0.0, posinf=0.0).max())
    # Infinity is allowed to be infinity alone, which is no difference.
    within = bool(((absolute <= allowed) & absolute.isfinite()).all())
    index = tuple(int(i) for i in places[worst])
    return Difference(
        **where,
        absolute=float(absolute[worst]),
        relative=float(relative.max()),
        index=index[: candidate.dim()] if candidate.is_complex() else index,
        candidate=float(a[worst]),
        reference=float(b[worst]),
        differing=differing,
        numel=ours.numel(),
        within=within,
    )


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` holds neither NaN nor infinity; of a sparse one, whether its values do."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout == torch.sparse_coo else tensor.to_dense()
    return bool(tensor.isfinite().all())


def square_distance(candidate: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """(sum of squared differences, sum of the reference's squares), in float64; complex numbers are pairs of reals."""
    if candidate.shape != reference.shape or not (candidate.is_floating_point() or candidate.is_complex()):
        return 0.0, 0.0
    ours, theirs = (_real(tensor) for tensor in _plain_pair(candidate, reference))
    return float((ours - theirs).square().sum()), float(theirs.square().sum())


def _unlike(candidate: torch.Tensor, reference: torch.Tensor) -> str:
    for what in ("shape", "dtype", "layout"):
        ours, theirs = getattr(candidate, what), getattr(reference, what)
        if ours != theirs:
            ours, theirs = (tuple(size) if what == "shape" else size for size in (ours, theirs))
            return f"{what} {ours} in the candidate, {theirs} in the reference"
    return ""


def _significant_strides(tensor: torch.Tensor) -> list[int]:
    """Strides of the dimensions that have more than one element."""
    if tensor.layout != torch.strided:
        return []
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _plain_pair(candidate: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as dense real tensors of equal shape, on the CPU."""
    ours, theirs = candidate.detach(), reference.detach()
    if ours.layout != torch.strided:
        if ours.layout == torch.sparse_coo:
            ours, theirs = ours.coalesce(), theirs.coalesce()
            if torch.equal(ours.indices(), theirs.indices()) and torch.equal(ours.values(), theirs.values()):
                # A large embedding's gradient has few rows: where they are equal, the others need not be made.
                return _plain(ours.values()), _plain(theirs.values())
        ours, theirs = ours.to_dense(), theirs.to_dense()
    return _plain(ours), _plain(theirs)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.cpu()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.bool:
        return tensor
    return tensor.view(_INTEGER_OF_SIZE[tensor.element_size()])


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float64)


def _distances(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Absolute and relative distance of each pair, in float64; infinite where exactly one is finite or a number."""
    ours, theirs = _real(a), _real(b)
    absolute = (ours - theirs).abs()
    if not a.is_floating_point():
        # Large integers that differ by little are the same float64.
        absolute = torch.maximum(absolute, torch.ones_like(absolute))
    absolute = absolute.masked_fill(ours == theirs, 0.0) if a.is_floating_point() else absolute
    absolute = absolute.nan_to_num(nan=math.inf, posinf=math.inf)
    larger = torch.maximum(ours.abs(), theirs.abs())
    relative = torch.where(absolute == 0, torch.zeros_like(absolute), absolute / larger)
    return absolute, relative.nan_to_num(nan=math.inf, posinf=math.inf)
