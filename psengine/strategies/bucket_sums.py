"""Sums buckets over the ranks of a collective, encoded or not; each rank counts once, or by its samples.

::

    summed as packed   values ───────────── all-reduce ────────────────────────────► sum
    summed payload     values ─ encode ─► payload ─ all-reduce ────────────────────► sum, in the payload's dtype
    sliced payloads    values ─ encode ─► payload ─ all-to-all ─► decode each, add ─► sum of this rank's slice ─┐
                       in pieces                                         sum ◄─ decode ◄─ all-gather ◄─ encode ─┘
    gathered payloads  values ─ encode ─► payload ─ all-gather ─► decode each, add ─► sum

Each rank decodes the same payloads in the order of ranks, so all have the same bits.

Where ``model.batch_weight`` is called, each rank counts by its samples::

    forward     weight 2 (rank 0), 6 (rank 1) ── all-reduce of one number, under way while ...
    backward    ... the first gradients are computed ──► total 8: rank 0 divides by 4, rank 1 by 4/3 while packing
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from typing_extensions import override

from psengine.codecs.base import Codec, CodecState
from psengine.codecs.identity import IDENTITY
from psengine.codecs.registry import codec_for
from psengine.collectives.base import Collective, Intermediate, Work
from psengine.collectives.contributions import SLICE_BYTES
from psengine.flat_optimizers.finite import is_finite
from psengine.strategies.exchange import BucketExchange
from psengine.tensors.bucket import Bucket
from psengine.tensors.share import NOTHING, Share

# So many decoded values are still in the cache when they are looked at.
CACHED_NUMEL = 128 * 1024
WHAT = "batch weights (model.batch_weight is called on every rank, or on none)"


class BucketSum(ABC):
    """How one bucket is summed, made when buckets are laid out, used in every step. ``codec`` covers its dtype.

    Attributes:
        states: what the codec keeps, each with where in the bucket its values begin. The first is of this rank's
            payloads, the others are of sums that this rank encodes for all.
        is_spoiled: whether the last sum has a value that is not finite, for which training code skips the step.
    """

    def __init__(self, bucket: Bucket, collective: Collective, codec: Codec = IDENTITY) -> None:
        self.bucket = bucket
        self.is_spoiled = False
        self._collective = collective
        self._codec = codec
        self._what = bucket.describe()
        self._state = codec.make_state(bucket.numel, bucket.dtype, bucket.device)
        self.states: list[tuple[int, CodecState]] = [] if self._state is None else [(0, self._state)]

    @abstractmethod
    def exchange(self, scale: float) -> BucketExchange:
        """Sum the packed gradients over ranks, times ``scale``."""

    def begin(self) -> None:
        """A backward begins: what the last one sent counts, unless it was given back."""
        self.is_spoiled = False
        for _, state in self.states:
            state.settle()

    def give_back(self, unused: Sequence[bool] | None = None) -> None:
        """What this backward sent did not count, of all parameters or of those that are unused."""
        for first, state in self.states:
            if unused is None:
                state.give_back()
                continue
            ends = [*self.bucket.offsets[1:], self.bucket.numel]
            for begin, end, is_unused in zip(self.bucket.offsets, ends, unused, strict=True):
                if is_unused:
                    state.give_back_part(max(0, begin - first), max(0, end - first))

    def left_out(self) -> torch.Tensor | None:
        """What this rank's payloads left out of past sums, laid out like the bucket; not to be written.

        None: the codec keeps nothing.
        """
        if self._state is None:
            return None
        _, *others = self.states
        whole = self._state.residual.clone() if others else self._state.residual
        for first, state in others:
            whole[first : first + state.residual.numel()] += state.residual
        return whole

    def take_left_out(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Go on with what ``left_out`` of another layout returned, in parts by name of the parameter."""
        self.reset()
        if self._state is not None:
            for name, view in zip(self.bucket.names, self.bucket.views_of(self._state.residual), strict=True):
                view.copy_(residuals[name])

    def reset(self) -> None:
        """Nothing was left out."""
        for _, state in self.states:
            state.reset()


class SummedAsPacked(BucketSum):
    """Packing wrote the payload: values, perhaps in a narrower dtype, or a sparse gradient."""

    @override
    def exchange(self, scale: float) -> BucketExchange:
        flat = self.bucket.flat
        yield self._collective.all_reduce(flat, scale, what=self._what)
        return flat


class SummedPayload(BucketSum):
    """Gradients are views of the bucket's values, so the payload is another tensor; the collective sums payloads."""

    def __init__(self, bucket: Bucket, collective: Collective, codec: Codec) -> None:
        super().__init__(bucket, collective, codec)
        spec = codec.payload_spec(bucket.numel, bucket.dtype)
        self._payload = collective.allocate(spec.numel, spec.dtype, bucket.device)

    @override
    def exchange(self, scale: float) -> BucketExchange:
        self._codec.encode(self.bucket.flat, self._payload)
        self.bucket.note_encoded(self._payload)
        yield self._collective.all_reduce(self._payload, scale, what=self._what)
        return self._payload


class GatheredPayloads(BucketSum):
    """Payloads that no collective can sum: each rank decodes those of all, and sums in the order of ranks."""

    def __init__(self, bucket: Bucket, collective: Collective, codec: Codec) -> None:
        super().__init__(bucket, collective, codec)
        spec = codec.payload_spec(bucket.numel, bucket.dtype)
        self._payload = torch.empty(spec.numel, dtype=spec.dtype, device=bucket.device)
        self._gathered = self._payload.new_empty((collective.world_size, spec.numel))

    @override
    def exchange(self, scale: float) -> BucketExchange:
        flat = self.bucket.flat
        self._codec.encode(flat, self._payload, self._state)
        yield self._collective.all_gather(self._gathered, self._payload, what=self._what)
        total = flat if flat.dtype.itemsize >= torch.float32.itemsize else flat.float()  # where values are added
        _add_up(self._codec, self._gathered, total, scale)
        if total is not flat:
            flat.copy_(total)
        self.is_spoiled = self._state is not None and not is_finite(flat)
        return flat


class SlicedPayloads(BucketSum):
    """The bucket travels in pieces. Of each piece every rank owns a slice: it sums all ranks' payloads of it, and
    encodes the sum for all.

    What the sums' payloads leave out are the owner's second residuals. Where pieces and slices are cut decides no bits.
    """

    def __init__(self, bucket: Bucket, collective: Collective, codec: Codec) -> None:
        super().__init__(bucket, collective, codec)
        assert codec.slice_numel is not None, "this codec's payloads cannot be cut"
        # Slices of a piece are alike, so that they can be gathered; the payload is as long as that of all of them.
        row_numel = collective.world_size * codec.slice_numel
        row = codec.payload_spec(row_numel, bucket.dtype)
        rows = -(-bucket.numel // row_numel)
        rows_of_piece = max(1, SLICE_BYTES * collective.world_size // row.size_bytes)
        payload = torch.zeros(rows * row.numel, dtype=row.dtype, device=bucket.device)
        self._encoded = payload[: codec.payload_spec(bucket.numel, bucket.dtype).numel]
        self._pieces = []
        for first in range(0, rows, rows_of_piece):
            end = min(rows, first + rows_of_piece)
            places = range(first * row_numel, end * row_numel)
            self._pieces.append(_Piece(bucket, places, payload[first * row.numel : end * row.numel], collective, codec))
        self.states += [(piece.own_first, piece.state) for piece in self._pieces if piece.state is not None]

    @override
    def exchange(self, scale: float) -> BucketExchange:
        self._codec.encode(self.bucket.flat, self._encoded, self._state)
        trades = [piece.trade() for piece in self._pieces]
        gathers = []
        for piece, trade in zip(self._pieces, trades, strict=True):
            yield Intermediate(trade)
            gathers.append(piece.gather_sums(scale))
        for piece, gather in zip(self._pieces, gathers, strict=True):
            yield gather
            self.is_spoiled |= not piece.decode_sums() and self._state is not None
        return self.bucket.flat


class _Piece:
    """A part of a bucket that travels by itself.

    Args:
        places: of its values in the bucket, of which the last ones may lie behind the bucket's end.
        payload: of all these places; ``trade`` sends it, and then it takes what is gathered.

    Attributes:
        own_first: where in the bucket this rank's slice begins.
        state: of the slice's sum; None where the codec keeps nothing.
    """

    def __init__(
        self, bucket: Bucket, places: range, payload: torch.Tensor, collective: Collective, codec: Codec
    ) -> None:
        self._collective = collective
        self._codec = codec
        self._what = bucket.describe()
        ranks, slice_numel = collective.world_size, len(places) // collective.world_size
        self.own_first = min(bucket.numel, places[collective.rank * slice_numel])
        self._values = bucket.flat[places.start : places.stop]
        self._own = bucket.flat[self.own_first : self.own_first + slice_numel]
        if self._own.dtype.itemsize < torch.float32.itemsize:
            self._own = self._own.float()  # 16-bit values are added in float32
        self._payload = payload.view(ranks, -1)
        grain = codec.slice_numel or 1
        step = max(1, CACHED_NUMEL // grain) * grain
        step_numel = codec.payload_spec(step, bucket.dtype).numel
        encoded = payload[: codec.payload_spec(self._values.numel(), bucket.dtype).numel]
        self._parts = list(zip(encoded.split(step_numel), self._values.split(step), strict=True))
        self._received = torch.empty_like(self._payload)
        self._own_payload = torch.zeros_like(self._payload[0])
        self._own_numel = codec.payload_spec(self._own.numel(), bucket.dtype).numel
        self.state = codec.make_state(self._own.numel(), bucket.dtype, bucket.device)

    def trade(self) -> Work:
        """Send each slice to its owner."""
        ranks, slice_numel = self._payload.shape
        sizes = [slice_numel] * ranks
        return self._collective.all_to_all(self._received, self._payload.view(-1), sizes, range(ranks), what=self._what)

    def gather_sums(self, scale: float) -> Work:
        """Sum this rank's slice of what came, and gather the payloads of all slices."""
        _add_up(self._codec, self._received[:, : self._own_numel], self._own, scale)
        self._codec.encode(self._own, self._own_payload[: self._own_numel], self.state)
        # The all-to-all has read the payload; its memory takes what is gathered.
        return self._collective.all_gather(self._payload, self._own_payload, what=self._what)

    def decode_sums(self) -> bool:
        """Decode the sums of all slices, as every rank does; whether all are finite."""
        finite = True
        for encoded, values in self._parts:
            self._codec.decode(encoded, values)
            finite = finite and is_finite(values)
        return finite


def _add_up(codec: Codec, payloads: torch.Tensor, total: torch.Tensor, scale: float) -> None:
    """Write to ``total`` the sum of the ranks' values, in the order of ranks, times ``scale``."""
    codec.decode(payloads[0], total)
    for payload in payloads[1:]:
        codec.decode_add(payload, total)
    if scale != 1:
        total.mul_(scale)


def make_sum(bucket: Bucket, collective: Collective, codec: Codec) -> BucketSum:
    """How ``bucket`` is summed."""
    if bucket.sparse:
        return SummedAsPacked(bucket, collective)
    codec = codec_for(codec, bucket.dtype)
    summed_dtype = codec.summed_dtype(bucket.dtype)
    if summed_dtype is bucket.flat.dtype:
        return SummedAsPacked(bucket, collective)
    if summed_dtype is not None:
        return SummedPayload(bucket, collective, codec)
    if codec.slice_numel is not None:
        return SlicedPayloads(bucket, collective, codec)
    return GatheredPayloads(bucket, collective, codec)


class BucketSums(list[BucketSum]):
    """How the buckets of a model are summed, by index."""

    def begin(self) -> None:
        """A backward begins."""
        self._end_last()
        for one in self:
            if one.states:
                one.begin()

    def _end_last(self) -> None:
        """Training code skips a step whose gradients are not finite, so of the last backward nothing counted. All ranks
        have the same sums.
        """
        if any(one.is_spoiled for one in self):
            for one in self:
                one.give_back()

    def residuals(self) -> dict[str, torch.Tensor]:
        """What this rank left out, by name of the parameter; not to be written."""
        self._end_last()
        return {
            name: residual
            for one in self
            if (whole := one.left_out()) is not None
            for name, residual in zip(one.bucket.names, one.bucket.views_of(whole), strict=True)
        }

    def reset(self) -> None:
        """Nothing was left out."""
        for one in self:
            one.reset()

    def take(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Go on with what ``residuals`` of others with these parameters returned; KeyError where one is missing."""
        for one in self if residuals else ():
            one.take_left_out(residuals)


class TotalWeight:
    """The sum of the ranks' weights for one backward, on its way; every rank makes one.

    Args:
        weight: of this rank.
        collective: reduces on ``device``.
    """

    def __init__(self, weight: float, collective: Collective, device: torch.device) -> None:
        self.weight = weight
        self._total = torch.tensor([weight], dtype=torch.float64, device=device)
        self._work = collective.all_reduce(self._total, what=WHAT)

    @functools.cached_property
    def value(self) -> float:
        """The sum; waits for it."""
        self._work.wait()
        return self._total.item()

    @property
    def share(self) -> Share:
        """The share of this rank: gradients are divided by total / weight, so that their sum is the average. A rank of
        weight 0 contributes nothing; where all weigh 0, the average is zeros.
        """
        total = self.value
        return Share(total / self.weight) if self.weight else NOTHING
