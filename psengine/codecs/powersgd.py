"""Codec "powersgd": each matrix as the product of two thin ones.

    matrix [m, n]  ─ · Q [n, r] ─► P [m, r] ─ orthogonalise ─► P̂ ─ matrixᵀ · P̂ ─► Q [n, r]      arrives: P̂ · Qᵀ

Over a collective P and Q are summed over ranks, so the sum of all matrices is what is factored. To and from servers
each payload is a factorisation of its own. Q is where the next step begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from typing_extensions import override

from psengine.codecs.base import Codec, CodecState, PayloadSpec
from psengine.codecs.blocks import checked_flag
from psengine.errors import ConfigurationError

# Factors below this have finite products: columns of the left factor have length 1.
LARGE = 1e37


class _Factors(CodecState):
    """The residual, and where the power iteration of each matrix goes on."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, *, has_feedback: bool) -> None:
        super().__init__(numel, dtype, device)
        self.has_feedback = has_feedback
        self.starts: dict[int, torch.Tensor] = {}


class PowerSgd(Codec):
    """Rank-``rank`` factors of each matrix, with error feedback; Vogels et al. 2019 (https://arxiv.org/abs/1905.13727).

    A parameter's gradient is a matrix of as many rows as its outermost dimension has elements. Vectors, and matrices
    that would not become smaller, travel as float32. A NaN or an infinity makes the whole matrix NaN.

    Args:
        rank: columns of the factors. More are more bytes, and nearer to the gradient.
        error_feedback: keep what the factors leave out and add it to the next gradient.
    """

    name = "powersgd"
    is_summed_in_rounds = True

    def __init__(self, *, rank: int = 4, error_feedback: bool = True) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise ConfigurationError(f"rank of codec 'powersgd' (expected an integer of at least 1, got {rank!r})")
        self._rank = rank
        self._has_feedback = checked_flag(self.name, "error_feedback", error_feedback)
        # Of the values that this object is for: number of elements and row length of each piece. None: one piece.
        self._pieces: tuple[tuple[int, int], ...] | None = None

    @override
    def for_pieces(self, pieces: Sequence[tuple[int, int]]) -> PowerSgd:
        codec = PowerSgd(**self.options)
        codec._pieces = tuple(pieces)
        return codec

    def _shapes(self, numel: int) -> list[tuple[int, int, int]]:
        """(elements, rows, columns) of each piece; columns 0 for one that travels as it is."""
        pieces = self._pieces if self._pieces is not None else ((numel, max(1, int(numel**0.5))),)
        assert sum(count for count, _ in pieces) == numel, "a codec for other values"
        shapes = []
        for count, columns in pieces:
            rows = -(-count // columns) if columns else 0
            is_smaller = columns > 1 and self._rank * (rows + columns) < count
            shapes.append((count, rows, columns) if is_smaller else (count, 0, 0))
        return shapes

    @override
    def payload_spec(self, numel: int, dtype: torch.dtype) -> PayloadSpec:
        floats = sum(
            self._rank * (rows + columns) if columns else count for count, rows, columns in self._shapes(numel)
        )
        return PayloadSpec(torch.uint8, 4 * floats)

    @override
    def make_state(self, numel: int, dtype: torch.dtype, device: torch.device) -> CodecState:
        return _Factors(numel, dtype, device, has_feedback=self._has_feedback)

    @override
    def encode(self, values: torch.Tensor, payload: torch.Tensor, state: CodecState | None = None) -> None:
        left, right = self.sum_rounds(values, None, state)
        payload.copy_(torch.cat([left, right]).view(torch.uint8))

    @override
    def decode(self, payload: torch.Tensor, into: torch.Tensor) -> None:
        floats = payload.clone().view(torch.float32)
        shapes = self._shapes(into.numel())
        left_numel = sum(_sizes(shapes, self._rank, 0))
        _write(into, shapes, self._rank, floats[:left_numel], floats[left_numel:])

    @override
    def sum_rounds(
        self, values: torch.Tensor, into: torch.Tensor | None, state: CodecState | None = None
    ) -> Iterator[torch.Tensor]:
        state = state if isinstance(state, _Factors) else None
        feedback = state if state is not None and state.has_feedback else None
        # A copy, so that a copy of the state (``copy.copy``) stays as it is.
        starts = {} if state is None else dict(state.starts)
        shapes = self._shapes(values.numel())
        # The memory of the next residual, so that what arrives is subtracted in place.
        corrected = (
            values.to(torch.promote_types(values.dtype, torch.float32))
            if feedback is None
            else torch.add(values, feedback.residual, out=feedback.next_residual())
        )
        matrices = [_matrix(part, rows, columns) for part, (_, rows, columns) in _parts(corrected, shapes)]
        left = corrected.new_empty(sum(_sizes(shapes, self._rank, 0)), dtype=torch.float32)
        for index, (product, matrix, (part, (_, rows, columns))) in enumerate(
            zip(_factors(left, shapes, self._rank, 0), matrices, _parts(corrected, shapes), strict=True)
        ):
            if columns:
                start = self._start(starts, index, columns, matrix.device)
                torch.mm(matrix, start, out=product.view(rows, self._rank))
            else:
                product.copy_(part)
        yield left
        bases = _factors(left, shapes, self._rank, 0)
        for basis, (_, rows, columns) in zip(bases, shapes, strict=True):
            if columns:
                basis.copy_(_orthogonal(basis.view(rows, self._rank)).reshape(-1))
        right = corrected.new_empty(sum(_sizes(shapes, self._rank, 1)), dtype=torch.float32)
        for product, matrix, basis, (_, rows, columns) in zip(
            _factors(right, shapes, self._rank, 1), matrices, bases, shapes, strict=True
        ):
            if columns:
                torch.mm(matrix.T, basis.view(rows, self._rank), out=product.view(columns, self._rank))
        own_right = right.clone()
        yield right
        for index, (factor, (_, _, columns)) in enumerate(
            zip(_factors(right, shapes, self._rank, 1), shapes, strict=True)
        ):
            if columns:
                # Not finite on one rank is not finite in the sum, on all: they begin anew together.
                start = factor.view(columns, self._rank).clone()
                starts.pop(index, None)
                if bool(start.isfinite().all()) and bool(start.any()):
                    starts[index] = start
        if state is not None:
            state.starts = starts
        if feedback is not None:
            # What arrived of this rank's own part of the sum.
            _subtract(corrected, shapes, self._rank, left, own_right)
            if own_right.numel() and not bool(own_right.abs().amax() < LARGE):
                corrected.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            feedback.keep()
        if into is not None:
            _write(into, shapes, self._rank, left, right)

    def _start(self, starts: dict[int, torch.Tensor], index: int, columns: int, device: torch.device) -> torch.Tensor:
        if index not in starts:
            generator = torch.Generator().manual_seed(index)  # the same on every rank
            return torch.randn(columns, self._rank, generator=generator).to(device)
        return starts[index]


def _parts(
    flat: torch.Tensor, shapes: Sequence[tuple[int, int, int]]
) -> list[tuple[torch.Tensor, tuple[int, int, int]]]:
    return list(zip(flat.split([count for count, _, _ in shapes]), shapes, strict=True))


def _sizes(shapes: Sequence[tuple[int, int, int]], rank: int, side: int) -> list[int]:
    """Elements of the left (0) or right (1) factors; pieces that travel as they are, are in the left."""
    return [rank * (rows, columns)[side] if columns else count * (1 - side) for count, rows, columns in shapes]


def _factors(flat: torch.Tensor, shapes: Sequence[tuple[int, int, int]], rank: int, side: int) -> list[torch.Tensor]:
    """The parts of the flat left (0) or right (1) factors."""
    return list(flat.split(_sizes(shapes, rank, side)))


def _matrix(part: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """float32; what the last row lacks is zeros."""
    if not columns:
        return part.new_empty(0, dtype=torch.float32)
    if part.numel() == rows * columns:
        return part.view(rows, columns).float()
    padded = part.new_zeros(rows * columns, dtype=torch.float32)
    padded[: part.numel()] = part
    return padded.view(rows, columns)


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns that span those of ``matrix``; NaN where that is not finite."""
    if not bool(matrix.isfinite().all()):
        return torch.full_like(matrix, torch.nan)
    return torch.linalg.qr(matrix).Q if matrix.any() else torch.zeros_like(matrix)


def _write(
    into: torch.Tensor, shapes: Sequence[tuple[int, int, int]], rank: int, left: torch.Tensor, right: torch.Tensor
) -> None:
    """Write the products of ``left`` and ``right``, and what travelled as it is."""
    lefts, rights = _factors(left, shapes, rank, 0), _factors(right, shapes, rank, 1)
    for (part, (count, rows, columns)), one, other in zip(_parts(into, shapes), lefts, rights, strict=True):
        if not columns:
            part.copy_(one)
        elif part.dtype is torch.float32 and count == rows * columns:
            torch.mm(one.view(rows, rank), other.view(columns, rank).T, out=part.view(rows, columns))
        else:
            part.copy_((one.view(rows, rank) @ other.view(columns, rank).T).view(-1)[:count])


def _subtract(
    residual: torch.Tensor, shapes: Sequence[tuple[int, int, int]], rank: int, left: torch.Tensor, right: torch.Tensor
) -> None:
    """Leave in ``residual`` what the products of ``left`` and ``right`` lack, and what float32 lacks of the rest."""
    lefts, rights = _factors(left, shapes, rank, 0), _factors(right, shapes, rank, 1)
    for (part, (count, rows, columns)), one, other in zip(_parts(residual, shapes), lefts, rights, strict=True):
        if not columns:
            part.sub_(part.float()).nan_to_num_(nan=0.0)
        elif part.dtype is torch.float32 and count == rows * columns:
            part.view(rows, columns).addmm_(one.view(rows, rank), other.view(columns, rank).T, alpha=-1)
        else:
            part.sub_((one.view(rows, rank) @ other.view(columns, rank).T).view(-1)[:count])
