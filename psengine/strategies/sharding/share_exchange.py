"""Gradients over messages: each rank gets the average of its share, added in gloo's order; the rest becomes zeros.

    bucket, on each rank   |a0 b0 a1 b1 ...|     parts of ranks a and b take turns
    all-to-all             rank a: a0 a1 ... of every rank; rank b: b0 b1 ...
    result, on rank a      |A0 00 A1 00 ...|     as an all-reduce would give it, bit for bit, and zeros

A rank sends half of what an all-reduce sends; the other half are the stepped parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from psengine.collectives.base import Collective
from psengine.collectives.ring_order import Stretch, stretches
from psengine.flat_optimizers.finite import is_finite
from psengine.strategies.exchange import BucketExchange
from psengine.strategies.sharding.plan import Piece
from psengine.tensors.bucket import Bucket


class ShareExchange:
    """The exchange of one bucket.

    Args:
        bucket: dense, of float32 or float64.
        collective: the ranks.
        pieces: by index of a parameter, its pieces.
        note: called with each result: whether this rank's share of it is finite.
    """

    def __init__(
        self,
        bucket: Bucket,
        collective: Collective,
        pieces: Mapping[int, list[Piece]],
        note: Callable[[bool], None],
    ) -> None:
        self._bucket = bucket
        self._collective = collective
        self._note = note
        by_rank: list[list[list[int]]] = [[] for _ in range(collective.world_size)]
        for index, offset in zip(bucket.parameter_indices, bucket.offsets, strict=True):
            for piece in pieces[index]:
                first = offset + piece.start
                ranges = by_rank[piece.owner]
                if ranges and ranges[-1][1] == first:
                    ranges[-1][1] += piece.numel
                else:
                    ranges.append([first, first + piece.numel])
        self._ranges = [(first, last) for ranges in by_rank for first, last in ranges]
        self._own = [(first, last) for first, last in by_rank[collective.rank]]
        self._sizes = [sum(last - first for first, last in ranges) for ranges in by_rank]
        self._sent = torch.empty(bucket.numel, dtype=bucket.dtype)
        self._received = torch.empty((collective.world_size, self._sizes[collective.rank]), dtype=bucket.dtype)
        self._stretches = list(self._stretches_received())

    def _stretches_received(self) -> list[tuple[int, Stretch]]:
        """Of this rank's share: (where a stretch begins in what is received, the stretch in the bucket)."""
        found, at = [], 0
        for first, last in self._own:
            for stretch in stretches(
                self._bucket.numel, self._bucket.dtype.itemsize, self._collective.world_size, first, last
            ):
                found.append((at, stretch))
                at += stretch.last - stretch.first
        return found

    def exchange(self) -> BucketExchange:
        """The exchange of the packed bucket, whose values are divided already."""
        flat = self._bucket.flat
        torch.cat([flat[first:last] for first, last in self._ranges], out=self._sent)
        what = self._bucket.describe()
        yield self._collective.all_to_all(self._received, self._sent, self._sizes, what=what)
        return self._add_up()

    def _add_up(self) -> torch.Tensor:
        """Write the sums of this rank's share to the bucket, and zeros beside them; return the bucket."""
        flat = self._bucket.flat
        flat.zero_()
        for at, (first, last, ranks) in self._stretches:
            parts = [self._received[rank, at : at + last - first] for rank in ranks]
            total = flat[first:last]
            torch.add(parts[0], parts[1], out=total)
            for part in parts[2:]:
                total.add_(part)
            self._note(is_finite(total))
        return flat
