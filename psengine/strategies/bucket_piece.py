"""A piece of a bucket whose payloads are cut into slices: this rank sums one of its slices and all are gathered."""

from __future__ import annotations

import torch

from psengine.codecs.base import Codec
from psengine.collectives.base import Collective
from psengine.flat_optimizers.finite import is_finite
from psengine.tensors.bucket import Bucket

# So many decoded values are still in the cache when they are looked at.
CACHED_NUMEL = 128 * 1024


class Piece:
    """A part of a bucket that travels by itself: payloads are traded, this rank's slice is summed, sums are gathered.

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
        self._payload = payload
        grain = codec.slice_numel or 1
        step = max(1, CACHED_NUMEL // grain) * grain
        step_bytes = codec.payload_spec(step, bucket.dtype).numel
        encoded = payload[: codec.payload_spec(self._values.numel(), bucket.dtype).numel]
        self._parts = list(zip(encoded.split(step_bytes), self._values.split(step), strict=True))
        self._sizes = [payload.numel() // ranks] * ranks
        self._received = payload.new_empty((ranks, self._sizes[0]))
        self._own_payload = payload.new_zeros(self._sizes[0])
        self._own_encoded = self._own_payload[: codec.payload_spec(self._own.numel(), bucket.dtype).numel]
        self.state = codec.make_state(self._own.numel(), bucket.dtype, bucket.device)

    def trade(self, scale: float) -> None:
        """Begin to send each slice to its owner."""
        self._scale = scale
        self._work = self._collective.all_to_all(self._received, self._payload, self._sizes, what=self._what)

    def begin_second(self) -> None:
        """Sum this rank's slice of what came, and begin to gather the payloads of all slices."""
        self._work.wait()
        size = self._own_encoded.numel()
        self._codec.decode(self._received[0, :size], self._own)
        for payload in self._received[1:]:
            self._codec.decode_add(payload[:size], self._own)
        if self._scale != 1:
            self._own.mul_(self._scale)
        self._codec.encode(self._own, self._own_encoded, self.state)
        # The all-to-all has read the payload; its memory takes what is gathered.
        gathered = self._payload.view(self._collective.world_size, -1)
        self._work = self._collective.all_gather(gathered, self._own_payload, what=self._what)

    def end(self) -> bool:
        """Decode the sums of all slices, as every rank does; whether all are finite."""
        self._work.wait()
        finite = True
        for encoded, values in self._parts:
            self._codec.decode(encoded, values)
            finite = finite and is_finite(values)
        return finite
