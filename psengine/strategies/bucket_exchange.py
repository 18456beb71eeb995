"""Sums one bucket's values over the ranks of a collective, encoded or not.

::

    summed as packed   values ───────────── all-reduce ────────────────────────────► sum
    summed payload     values ─ encode ─► payload ─ all-reduce ────────────────────► sum, in the payload's dtype
    sliced payloads    values ─ encode ─► payload ─ all-to-all ─► decode each, add ─► sum of this rank's slice ─┐
                       in pieces                                         sum ◄─ decode ◄─ all-gather ◄─ encode ─┘
    summed in rounds   values ─► P ─ all-reduce ─► Q ─ all-reduce ─► sum
    gathered payloads  values ─ encode ─► payload ─ all-gather ─► decode each, add ─► sum

Each rank decodes the same payloads in the order of ranks, so all have the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import TypeAlias

import torch
from typing_extensions import override

from psengine.codecs.base import Codec, CodecState
from psengine.codecs.identity import IDENTITY
from psengine.codecs.registry import codec_for, row_numel
from psengine.collectives.base import Collective, Work
from psengine.flat_optimizers.finite import is_finite
from psengine.strategies.bucket_piece import Piece
from psengine.strategies.exchange import Reduction
from psengine.tensors.bucket import Bucket

PendingQueue: TypeAlias = "deque[Piece | _Rounds]"

# Payloads that are cut into slices travel in pieces, so that links are busy while slices are summed. A slice of a piece
# is one message between two ranks; of this size its own costs are small whatever the number of ranks.
SLICE_BYTES = 256 * 1024


class BucketExchange(ABC):
    """The exchange of one bucket, made when buckets are laid out, used in every step. ``codec`` covers its dtype.

    Attributes:
        state: of this rank's payloads; None where the codec keeps nothing.
        has_sent: whether this backward sent a payload.
        is_spoiled: whether the last sum has a value that is not finite, for which training code skips the step.
    """

    def __init__(self, bucket: Bucket, collective: Collective, codec: Codec = IDENTITY) -> None:
        self.bucket = bucket
        self.state = None if bucket.sparse else codec.make_state(bucket.numel, bucket.dtype, bucket.device)
        self.has_sent = self.is_spoiled = False
        self._collective = collective
        self._codec = codec
        self._what = bucket.describe()

    @abstractmethod
    def reduce(self, scale: float) -> Reduction:
        """Begin to sum the packed gradients over ranks, times ``scale``."""

    def states(self) -> list[tuple[int, CodecState]]:
        """What the codec keeps, and where in the bucket its values begin."""
        return [] if self.state is None else [(0, self.state)]

    def note_sum(self, flat: torch.Tensor) -> torch.Tensor:
        """``flat``, which is a sum."""
        self.is_spoiled = self.state is not None and not is_finite(flat)
        return flat

    def give_back(self) -> None:
        """What this backward sent did not count."""
        if self.has_sent:
            for _, state in self.states():
                state.give_back()

    def spare(self, unused: Sequence[bool]) -> None:
        """What this backward sent of these parameters did not count."""
        ends = [*self.bucket.offsets[1:], self.bucket.numel]
        for first, end, is_unused in zip(self.bucket.offsets, ends, unused, strict=True):
            for begin, state in self.states() if is_unused else ():
                state.give_back_part(max(0, first - begin), max(0, end - begin))

    def left_out(self) -> torch.Tensor | None:
        """What this rank's payloads left out of past sums, laid out like the bucket; not to be written.

        None: the codec keeps nothing.
        """
        return None if self.state is None else self.state.residual

    def take_left_out(self) -> None:  # noqa: B027 - most have one residual
        """``state.residual`` was overwritten by what ``left_out`` of a former exchange returned."""


class SummedAsPacked(BucketExchange):
    """Packing wrote the payload: values, perhaps in a narrower dtype, or a sparse gradient."""

    @override
    def reduce(self, scale: float) -> Reduction:
        flat = self.bucket.flat
        return _Sum(flat, self._collective.all_reduce(flat, scale, what=self._what))


class SummedPayload(BucketExchange):
    """Gradients are views of the bucket's values, so the payload is another tensor; the collective sums payloads."""

    def __init__(self, bucket: Bucket, collective: Collective, codec: Codec) -> None:
        super().__init__(bucket, collective, codec)
        spec = codec.payload_spec(bucket.numel, bucket.dtype)
        self._payload = collective.allocate(spec.numel, spec.dtype, bucket.device)

    @override
    def reduce(self, scale: float) -> Reduction:
        self._codec.encode(self.bucket.flat, self._payload)
        self.bucket.note_encoded(self._payload)
        return _Sum(self._payload, self._collective.all_reduce(self._payload, scale, what=self._what))


class SlicedPayloads(BucketExchange):
    """The bucket travels in pieces. Of each piece every rank owns a slice: it sums all ranks' payloads of it, and
    encodes the sum for all.

    What the sums' payloads leave out are the owner's second residuals. Where pieces and slices are cut decides no bits.

    Args:
        queue: what of this backward has its second operation yet to begin; shared by all buckets. An all-gather begins
            when a sum is waited for, in the order of buckets and pieces, which is the same on every rank.
    """

    def __init__(self, bucket: Bucket, collective: Collective, codec: Codec, queue: PendingQueue) -> None:
        super().__init__(bucket, collective, codec)
        assert codec.slice_numel is not None, "this codec's payloads cannot be cut"
        self._queue = queue
        # Slices of a piece are alike, so that they can be gathered; the payload is as long as that of all of them.
        row_numel = collective.world_size * codec.slice_numel
        row_bytes = codec.payload_spec(row_numel, bucket.dtype).numel
        rows, rows_of_piece = -(-bucket.numel // row_numel), max(1, SLICE_BYTES * collective.world_size // row_bytes)
        payload = torch.zeros(rows * row_bytes, dtype=torch.uint8, device=bucket.device)
        self._encoded = payload[: codec.payload_spec(bucket.numel, bucket.dtype).numel]
        self._pieces = []
        for row in range(0, rows, rows_of_piece):
            end = min(rows, row + rows_of_piece)
            places = range(row * row_numel, end * row_numel)
            self._pieces.append(Piece(bucket, places, payload[row * row_bytes : end * row_bytes], collective, codec))

    @override
    def reduce(self, scale: float) -> Reduction:
        self.has_sent = True
        self._codec.encode(self.bucket.flat, self._encoded, self.state)
        for piece in self._pieces:
            piece.trade(scale)
        self._queue.extend(self._pieces)
        return _SlicedSum(self, self._pieces, self._queue)

    @override
    def states(self) -> list[tuple[int, CodecState]]:
        return super().states() + self._second_states()

    def _second_states(self) -> list[tuple[int, CodecState]]:
        return [(piece.own_first, piece.state) for piece in self._pieces if piece.state is not None]

    @override
    def left_out(self) -> torch.Tensor | None:
        if self.state is None:
            return None
        whole = self.state.residual.clone()
        for first, state in self._second_states():
            whole[first : first + state.residual.numel()] += state.residual
        return whole

    @override
    def take_left_out(self) -> None:
        for _, state in self._second_states():
            state.reset()


class SummedRounds(BucketExchange):
    """The codec says what is summed, round by round; the second begins when the sum is waited for."""

    def __init__(self, bucket: Bucket, collective: Collective, codec: Codec, queue: PendingQueue) -> None:
        super().__init__(bucket, collective, codec)
        self._queue = queue

    @override
    def reduce(self, scale: float) -> Reduction:
        self.has_sent = True
        rounds = self._codec.sum_rounds(self.bucket.flat, self.bucket.flat, self.state)
        reduction = _Rounds(self, self._collective, rounds, scale, self._queue)
        self._queue.append(reduction)
        return reduction


class GatheredPayloads(BucketExchange):
    """Payloads that no collective can sum: each rank decodes those of all, and sums in the order of ranks."""

    def __init__(self, bucket: Bucket, collective: Collective, codec: Codec) -> None:
        super().__init__(bucket, collective, codec)
        spec = codec.payload_spec(bucket.numel, bucket.dtype)
        self._payload = torch.empty(spec.numel, dtype=spec.dtype, device=bucket.device)
        self._gathered = self._payload.new_empty((collective.world_size, spec.numel))

    @override
    def reduce(self, scale: float) -> Reduction:
        self.has_sent = True
        self._codec.encode(self.bucket.flat, self._payload, self.state)
        work = self._collective.all_gather(self._gathered, self._payload, what=self._what)
        return _DecodedSum(self, self._codec, self._gathered, scale, work)


class _Sum(Reduction):
    """An all-reduce in place."""

    def __init__(self, payload: torch.Tensor, work: Work) -> None:
        self._payload = payload
        self._work = work

    @override
    def wait(self) -> torch.Tensor:
        self._work.wait()
        return self._payload


class _Encoded(Reduction):
    """One whose codec may keep what it leaves out."""

    def __init__(self, exchange: BucketExchange) -> None:
        self._exchange = exchange

    @override
    def drop(self) -> None:
        self.wait()
        self._exchange.give_back()

    @override
    def spare(self, unused: Sequence[bool]) -> None:
        self._exchange.spare(unused)


class _DecodedSum(_Encoded):
    """An all-gather; ``wait`` decodes the payloads."""

    def __init__(
        self, exchange: BucketExchange, codec: Codec, gathered: torch.Tensor, scale: float, work: Work
    ) -> None:
        super().__init__(exchange)
        self._codec = codec
        self._gathered = gathered
        self._scale = scale
        self._work = work

    @override
    def wait(self) -> torch.Tensor:
        self._work.wait()
        flat = self._exchange.bucket.flat
        total = flat if flat.dtype.itemsize >= torch.float32.itemsize else flat.float()  # where values are added
        self._codec.decode(self._gathered[0], total)
        for payload in self._gathered[1:]:
            self._codec.decode_add(payload, total)
        if self._scale != 1:
            total.mul_(self._scale)
        return self._exchange.note_sum(flat if total is flat else flat.copy_(total))


class _TwoOperations(_Encoded):
    """A reduction of two operations, of which the second begins in a wait."""

    def __init__(self, exchange: BucketExchange, queue: PendingQueue) -> None:
        super().__init__(exchange)
        self._queue = queue

    @abstractmethod
    def _end(self) -> torch.Tensor:
        """Wait for the second operation; the sum."""

    @override
    def wait(self) -> torch.Tensor:
        while self._queue:
            self._queue.popleft().begin_second()  # of later buckets too, so that they travel while this one is decoded
        return self._end()


class _SlicedSum(_TwoOperations):
    """Of each piece an all-to-all; then this rank's slice is summed, and all slices are gathered."""

    def __init__(self, exchange: BucketExchange, pieces: Sequence[Piece], queue: PendingQueue) -> None:
        super().__init__(exchange, queue)
        self._pieces = pieces

    @override
    def _end(self) -> torch.Tensor:
        finite = [piece.end() for piece in self._pieces]
        self._exchange.is_spoiled = self._exchange.state is not None and not all(finite)
        return self._exchange.bucket.flat


class _Rounds(_TwoOperations):
    """Two all-reduces of what the codec says."""

    def __init__(
        self,
        exchange: BucketExchange,
        collective: Collective,
        rounds: Generator[torch.Tensor, torch.Tensor, None],
        scale: float,
        queue: PendingQueue,
    ) -> None:
        super().__init__(exchange, queue)
        self._collective = collective
        self._rounds = rounds
        self._scale = scale
        self._sum_of(next(rounds))

    def _sum_of(self, addend: torch.Tensor) -> None:
        self._summed = addend
        what = self._exchange.bucket.describe()
        self._work = self._collective.all_reduce(addend, self._scale, what=what)

    def begin_second(self) -> None:
        """Wait for the first sum, and begin the second."""
        self._work.wait()
        self._sum_of(self._rounds.send(self._summed))

    @override
    def _end(self) -> torch.Tensor:
        self._work.wait()
        with suppress(StopIteration):
            self._rounds.send(self._summed)
            raise AssertionError("a codec sums in two rounds")
        return self._exchange.note_sum(self._exchange.bucket.flat)


def make_exchange(bucket: Bucket, collective: Collective, codec: Codec, queue: PendingQueue) -> BucketExchange:
    """The exchange of ``bucket``; ``queue`` is shared by the buckets of a model, empty when a backward begins."""
    if bucket.sparse:
        return SummedAsPacked(bucket, collective)
    codec = codec_for(codec, bucket.dtype)
    summed_dtype = codec.summed_dtype(bucket.dtype)
    if summed_dtype is bucket.flat.dtype:
        return SummedAsPacked(bucket, collective)
    if summed_dtype is not None:
        return SummedPayload(bucket, collective, codec)
    codec = codec.for_pieces([(one.numel(), row_numel(one.shape, one.stride())) for one in bucket.parameters])
    if codec.is_summed_in_rounds:
        return SummedRounds(bucket, collective, codec, queue)
    if codec.slice_numel is not None:
        return SlicedPayloads(bucket, collective, codec, queue)
    return GatheredPayloads(bucket, collective, codec)
