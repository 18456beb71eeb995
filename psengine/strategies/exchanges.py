"""The sums of a model's buckets, and what their codecs left out, by name of the parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from psengine.codecs.base import Codec
from psengine.collectives.base import Collective
from psengine.strategies.bucket_sums import BucketSum, make_sum
from psengine.tensors.bucket import Bucket


class Exchanges:
    """How each bucket is summed, by index. Residuals of ``former``, in another layout, move with their parameters."""

    def __init__(
        self, buckets: Sequence[Bucket], collective: Collective, codec: Codec, former: Exchanges | None = None
    ) -> None:
        self._sums = [make_sum(bucket, collective, codec) for bucket in buckets]
        if former is not None:
            self.take(former.residuals())

    def __getitem__(self, index: int) -> BucketSum:
        return self._sums[index]

    def __iter__(self) -> Iterator[BucketSum]:
        return iter(self._sums)

    def begin(self) -> None:
        """A backward begins."""
        self._end_last()
        for one in self._sums:
            one.begin()

    def _end_last(self) -> None:
        """Training code skips a step whose gradients are not finite, so of the last backward nothing counted. All ranks
        have the same sums.
        """
        if any(one.is_spoiled for one in self._sums):
            for one in self._sums:
                one.give_back()

    def residuals(self) -> dict[str, torch.Tensor]:
        """What this rank left out, by name of the parameter; not to be written."""
        self._end_last()
        return {
            name: residual
            for one in self._sums
            if (whole := one.left_out()) is not None
            for name, residual in zip(one.bucket.names, one.bucket.views_of(whole), strict=True)
        }

    def reset(self) -> None:
        """Nothing was left out."""
        for one in self._sums:
            one.reset()

    def take(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Go on with what ``residuals`` of others with these parameters returned; KeyError where one is missing."""
        for one in self._sums if residuals else ():
            one.take_left_out(residuals)
