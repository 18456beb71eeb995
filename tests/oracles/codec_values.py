"""What arrives of values that travel under a codec.

    values ─ + residual ─► what the codec keeps of them ─► arrives        residual: what does not

An oracle, in plain torch: it shares the codecs' names and options with psengine.codecs, and nothing else.
``REFERENCE_VALUES`` says of each codec what arrives of float32 values (``payloads`` says how); ``Factors`` is
"powersgd"; casts round values and keep nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from oracles import payloads
from oracles.payloads import CASTS
from psengine.codecs.base import Codec

Arrives: TypeAlias = Callable[[Tensor], Tensor]
# Of each piece of a bucket: number of elements, and of those in a row of its matrix; 0 for a vector.
Pieces: TypeAlias = Sequence[tuple[int, int]]


def of_blocks(codec: str) -> Arrives:
    """What the blocks of "int8", "fp4" or "onebit" keep."""

    def arrives(values: Tensor) -> Tensor:
        block = payloads.BLOCKS[codec]
        block_bytes = block.scale_bytes + block.code_bytes
        payload = torch.empty(-(-len(values) // block.numel) * block_bytes, dtype=torch.uint8)
        payloads.encode_blocks_(payload, values, codec)
        return payloads.decoded(codec, payload, len(values))

    return arrives


def topk(ratio: float = 0.01) -> Arrives:
    """The largest ``ratio`` of the values."""

    def arrives(values: Tensor) -> Tensor:
        count = max(1, math.ceil(ratio * len(values)))
        places, found = torch.empty(count, dtype=torch.int32), torch.empty(count)
        payloads.encode_largest_(places, found, values)
        return torch.zeros_like(values).index_copy_(0, places.long(), found)

    return arrives


# From a codec's options to what arrives.
REFERENCE_VALUES: dict[str, Callable[..., Arrives]] = {
    **{name: functools.partial(of_blocks, name) for name in payloads.BLOCKS},
    "topk": topk,
}


class Sender:
    """What one replica sends, time after time: what is left out goes with the next values, unless ``keeps`` is false.

    Attributes:
        residual: what was left out; None before the first values, and where nothing is kept.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self.residual: Tensor | None = None
        self._keeps = keeps
        self._former: Tensor | None = None

    def __call__(self, values: Tensor) -> Tensor:
        """What arrives, in the dtype of ``values`` or a wider one; default: the values."""
        return values

    def corrected(self, values: Tensor) -> Tensor:
        """With what was left out, in float32 at least."""
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        if not self._keeps:
            return wide
        # A sum with zeros has no negative zero.
        return wide + (torch.zeros_like(wide) if self.residual is None else self.residual)

    def keep(self, left_out: Tensor) -> None:
        """Of the values that were corrected last."""
        if self._keeps:
            self._former, self.residual = self.residual, left_out

    def spare(self, first: int, end: int) -> None:
        """What was sent last of these values did not count."""
        if self.residual is not None:
            self.residual[first:end] = 0.0 if self._former is None else self._former[first:end]


class Rounded(Sender):
    """A cast."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(keeps=False)
        self._dtype = dtype

    def __call__(self, values: Tensor) -> Tensor:
        return values.to(self._dtype).to(values.dtype)


class WithFeedback(Sender):
    """A codec whose payloads are summed after decoding."""

    def __init__(self, arrives: Arrives, *, keeps: bool = True) -> None:
        super().__init__(keeps=keeps)
        self._arrives = arrives

    def __call__(self, values: Tensor) -> Tensor:
        corrected = self.corrected(values)
        arrived = self._arrives(corrected.float()).to(corrected.dtype)
        self.keep(corrected - arrived)
        return arrived


class Factors:
    """The power iteration of "powersgd" on a bucket, whose matrices M become P·Qᵀ; vectors travel as they are.

    P is the bases of ``left``, Q is ``right``; both of all matrices are one flat float32 tensor, so that replicas'
    can be summed. The first Q of matrix i is drawn by a generator with seed i; the next one is where the last ended.
    """

    def __init__(self, pieces: Pieces, rank: int) -> None:
        self._rank = rank
        # (elements, rows, columns); no rows: it travels as it is.
        self._shapes = []
        for numel, columns in pieces:
            rows = math.ceil(numel / columns) if columns > 1 else 0
            is_smaller = rank * (rows + columns) < numel
            self._shapes.append((numel, rows, columns) if rows and is_smaller else (numel, 0, 0))
        self._starts = [torch.empty(0) for _ in pieces]
        self.restart()

    def restart(self) -> None:
        """Draw the first Q anew."""
        for index, (_, _, columns) in enumerate(self._shapes):
            generator = torch.Generator().manual_seed(index)
            self._starts[index] = torch.randn(columns, self._rank, generator=generator)

    def left(self, values: Tensor) -> Tensor:
        """M·Q of each matrix, and the vectors."""
        pairs = zip(self._split(values), self._starts, self._shapes, strict=True)
        return torch.cat([(_matrix(m, shape) @ q).view(-1) if shape[1] else m.float() for m, q, shape in pairs])

    def bases(self, left: Tensor) -> Tensor:
        """Orthonormal columns of each M·Q, and the vectors."""
        found = []
        for part, (_, rows, _) in zip(self._split_left(left), self._shapes, strict=True):
            columns = part.view(rows, self._rank) if rows else part
            found.append(torch.linalg.qr(columns).Q.reshape(-1) if rows and columns.any() else part)
        return torch.cat(found)

    def right(self, values: Tensor, bases: Tensor) -> Tensor:
        """Mᵀ·P of each matrix."""
        triples = zip(self._split(values), self._split_left(bases), self._shapes, strict=True)
        products = [(_matrix(m, s).T @ p.view(s[1], self._rank)).view(-1) for m, p, s in triples if s[1]]
        return torch.cat([torch.empty(0), *products])

    def begin_at(self, right: Tensor) -> None:
        """The next iteration begins with this Q; a matrix of zeros begins anew."""
        former = self._starts
        self._starts = [torch.empty(0) for _ in former]
        self.restart()
        for index, (part, (_, rows, columns)) in enumerate(zip(self._split_right(right), self._shapes, strict=True)):
            if rows and part.any():
                self._starts[index] = part.view(columns, self._rank).clone()

    def product(self, bases: Tensor, right: Tensor) -> Tensor:
        """P·Qᵀ of each matrix, and the vectors."""
        triples = zip(self._split_left(bases), self._split_right(right), self._shapes, strict=True)
        return torch.cat([self._product(p, q, shape)[: shape[0]] if shape[1] else p for p, q, shape in triples])

    def left_out(self, values: Tensor, bases: Tensor, right: Tensor) -> Tensor:
        """``values`` less ``product``. Whole float32 matrices are subtracted from in the product's own pass."""
        found = []
        lefts, rights = self._split_left(bases), self._split_right(right)
        for part, p, q, shape in zip(self._split(values), lefts, rights, self._shapes, strict=True):
            numel, rows, columns = shape
            if not rows:
                found.append(part - part.float())
            elif part.dtype == torch.float32 and numel == rows * columns:
                left, other = p.view(rows, self._rank), q.view(columns, self._rank)
                found.append(torch.addmm(part.view(rows, columns), left, other.T, alpha=-1).view(-1))
            else:
                found.append(part - self._product(p, q, shape)[:numel])
        return torch.cat(found)

    def _product(self, p: Tensor, q: Tensor, shape: tuple[int, int, int]) -> Tensor:
        return (p.view(shape[1], self._rank) @ q.view(shape[2], self._rank).T).view(-1)

    def _split(self, values: Tensor) -> Sequence[Tensor]:
        return list(values.split([numel for numel, _, _ in self._shapes]))

    def _split_left(self, left: Tensor) -> Sequence[Tensor]:
        return list(left.split([rows * self._rank if rows else numel for numel, rows, _ in self._shapes]))

    def _split_right(self, right: Tensor) -> Sequence[Tensor]:
        return list(right.split([columns * self._rank for _, _, columns in self._shapes]))


def _matrix(part: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """float32; what the last row lacks is zeros."""
    numel, rows, columns = shape
    if numel == rows * columns:
        return part.view(rows, columns).float()
    return torch.nn.functional.pad(part, (0, rows * columns - numel)).view(rows, columns).float()


class Factored(Sender):
    """A codec "powersgd" whose payloads are summed after decoding: each is a factorisation of its own."""

    def __init__(self, pieces: Pieces, *, rank: int = 4, error_feedback: bool = True) -> None:
        super().__init__(keeps=error_feedback)
        self._factors = Factors(pieces, rank)

    def __call__(self, values: Tensor) -> Tensor:
        corrected = self.corrected(values)
        bases = self._factors.bases(self._factors.left(corrected))
        right = self._factors.right(corrected, bases)
        self._factors.begin_at(right)
        self.keep(self._factors.left_out(corrected, bases, right))
        return self._factors.product(bases, right)


def is_covered(codec: Codec, dtype: torch.dtype) -> bool:
    """Whether values of ``dtype`` change under the codec."""
    cast = CASTS.get(codec.name)
    return not codec.is_lossless and dtype.is_floating_point and (cast is None or dtype.itemsize > cast.itemsize)


def sender(codec: Codec, dtype: torch.dtype, pieces: Pieces) -> Sender:
    """What one replica, or a server, sends of values of ``dtype``, which are these pieces."""
    options = dict(codec.options)
    if not is_covered(codec, dtype):
        return Sender(keeps=False)
    if codec.name in CASTS:
        return Rounded(CASTS[codec.name])
    if codec.name == "powersgd":
        return Factored(pieces, **options)
    keeps = options.pop("error_feedback", True)
    return WithFeedback(REFERENCE_VALUES[codec.name](**options), keeps=keeps)
