"""Sums one bucket's values over the ranks of a collective, encoded or not.

::

    summed as packed   values ───────────── all-reduce ────────────────────────────► sum
    summed payload     values ─ encode ─► payload ─ all-reduce ────────────────────► sum, in the payload's dtype
    sliced payloads    values ─ encode ─► payload ─ all-to-all ─► decode each, add ─► sum of this rank's slice ─┐
                                                                         sum ◄─ decode ◄─ all-gather ◄─ encode ─┘
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
from psengine.strategies.exchange import Reduction
from psengine.tensors.bucket import Bucket

PendingQueue: TypeAlias = "deque[_Pending]"


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
    """Each rank owns a slice: it sums all ranks' payloads of it, and encodes the sum for all.

    What the sum's payload leaves out is the owner's second residual.

    Args:
        queue: the reductions of this backward whose slices are not summed yet; shared by all buckets. An all-gather
            begins when its sum is waited for, in the order of buckets, which is the same on every rank.
    """

    def __init__(self, bucket: Bucket, collective: Collective, codec: Codec, queue: PendingQueue) -> None:
        super().__init__(bucket, collective, codec)
        assert codec.slice_numel is not None, "this codec's payloads cannot be cut"
        self._queue = queue
        ranks, rank, grain = collective.world_size, collective.rank, codec.slice_numel
        # Slices are alike, so that they can be gathered; the payload is as long as that of all of them.
        self._slice_numel = -(-bucket.numel // (ranks * grain)) * grain
        self._first = min(bucket.numel, rank * self._slice_numel)
        self._own = bucket.flat[self._first : self._first + self._slice_numel]
        if self._own.dtype.itemsize < torch.float32.itemsize:
            self._own = self._own.float()  # 16-bit values are added in float32
        slice_bytes = codec.payload_spec(self._slice_numel, bucket.dtype).numel
        self._payload = torch.zeros(ranks * slice_bytes, dtype=torch.uint8, device=bucket.device)
        self._encoded = self._payload[: codec.payload_spec(bucket.numel, bucket.dtype).numel]
        self._received = torch.empty((ranks, slice_bytes), dtype=torch.uint8, device=bucket.device)
        self._own_payload = torch.zeros(slice_bytes, dtype=torch.uint8, device=bucket.device)
        self._own_encoded = self._own_payload[: codec.payload_spec(self._own.numel(), bucket.dtype).numel]
        self._sizes = [slice_bytes] * ranks
        self.second_state = codec.make_state(self._own.numel(), bucket.dtype, bucket.device)

    @override
    def reduce(self, scale: float) -> Reduction:
        self.has_sent = True
        self._codec.encode(self.bucket.flat, self._encoded, self.state)
        work = self._collective.all_to_all(self._received, self._payload, self._sizes, what=self.bucket.describe())
        reduction = _SlicedSum(self, scale, work, self._queue)
        self._queue.append(reduction)
        return reduction

    def sum_slice(self, scale: float) -> Work:
        """Sum this rank's slice of what came, and begin to gather the payloads of all slices."""
        size = self._own_encoded.numel()
        self._codec.decode(self._received[0, :size], self._own)
        for payload in self._received[1:]:
            self._codec.decode_add(payload[:size], self._own)
        if scale != 1:
            self._own.mul_(scale)
        self._codec.encode(self._own, self._own_encoded, self.second_state)
        # The all-to-all has read the payload; its memory takes what is gathered.
        gathered = self._payload.view(self._collective.world_size, -1)
        return self._collective.all_gather(gathered, self._own_payload, what=self.bucket.describe())

    def decode_all(self) -> torch.Tensor:
        """The sum of all slices, as every rank decodes it."""
        self._codec.decode(self._encoded, self.bucket.flat)
        return self.note_sum(self.bucket.flat)

    @override
    def states(self) -> list[tuple[int, CodecState]]:
        own = [] if self.second_state is None else [(self._first, self.second_state)]
        return super().states() + own

    @override
    def left_out(self) -> torch.Tensor | None:
        if self.state is None or self.second_state is None:
            return None
        whole = self.state.residual.clone()
        whole[self._first : self._first + self._own.numel()] += self.second_state.residual
        return whole

    @override
    def take_left_out(self) -> None:
        if self.second_state is not None:
            self.second_state.reset()


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


class _Pending(_Encoded):
    """A reduction whose second operation begins in ``wait``, in the order of the queue: the same on every rank."""

    def __init__(self, exchange: BucketExchange, queue: PendingQueue) -> None:
        super().__init__(exchange)
        self._queue = queue
        self._has_begun = False

    @abstractmethod
    def _begin_second(self) -> None:
        """Wait for the first operation, and begin the second."""

    @abstractmethod
    def _end(self) -> torch.Tensor:
        """Wait for the second operation; the sum."""

    def _begin(self) -> None:
        self._has_begun = True
        self._begin_second()

    @override
    def wait(self) -> torch.Tensor:
        while not self._has_begun:
            self._queue.popleft()._begin()
        if self._queue:
            self._queue.popleft()._begin()  # so that it travels while this one is decoded
        return self._end()


class _SlicedSum(_Pending):
    """An all-to-all; then this rank's slice is summed, and all slices are gathered."""

    def __init__(self, exchange: SlicedPayloads, scale: float, work: Work, queue: PendingQueue) -> None:
        super().__init__(exchange, queue)
        self._slices = exchange
        self._scale = scale
        self._work = work

    @override
    def _begin_second(self) -> None:
        self._work.wait()
        self._work = self._slices.sum_slice(self._scale)

    @override
    def _end(self) -> torch.Tensor:
        self._work.wait()
        return self._slices.decode_all()


class _Rounds(_Pending):
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

    @override
    def _begin_second(self) -> None:
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
