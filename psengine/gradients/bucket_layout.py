"""A reducer's buckets: how parameters are dealt out to them, first by guess, then in the order gradients arrive."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from psengine.gradients.packing import Packing, SparsePacking, ViewPacking
from psengine.strategies.base import Strategy
from psengine.tensors.bucket import Bucket
from psengine.tensors.bucket_plan import plan_buckets


class BucketLayout:
    """Makes the buckets of ``parameters``, in memory that ``strategy`` allocates, and tells the strategy of them.

    Attributes:
        packings: by bucket, in the order they are reduced, what moves its gradients.
        locators: by parameter, the packing of its bucket and its position there.
        small_parameter_buckets: by parameter, its bucket's index where it is packed together with others, else None.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        expects_sparse: Sequence[bool],
        strategy: Strategy,
        *,
        as_view: bool,
        adopts: bool,
        counts_non_finite: bool,
        divides_copies: bool,
    ) -> None:
        self._parameters = parameters
        self._names = names
        self._expects_sparse = expects_sparse
        self._strategy = strategy
        self._as_view = as_view
        self._counts_non_finite = counts_non_finite
        self._divides_copies = divides_copies
        self._adopts = adopts
        self.buckets: list[Bucket] = []
        self.packings: list[Packing] = []
        self.locators: list[tuple[Packing, int]] = []
        self.small_parameter_buckets: list[int | None] = []

    def create(self, limits_bytes: Sequence[int], order: Sequence[int] | None = None) -> None:
        """Make buckets of at most ``limits_bytes``; see ``plan_buckets``.

        Args:
            limits_bytes: caps.
            order: indices of parameters as their gradients arrived; None guesses that they arrive in reverse.
        """
        plans = plan_buckets(self._parameters, limits_bytes, self._expects_sparse, order)
        self.buckets = [
            Bucket(
                index,
                plan,
                self._parameters,
                self._names,
                sparse=self._expects_sparse[plan[0]],
                allocate=functools.partial(self._strategy.allocate, keeps_dtype=self._as_view),
                counts_non_finite=self._counts_non_finite,
                divides_copies=self._divides_copies,
            )
            # A measured order needs no guess.
            for index, plan in enumerate(plans[::-1] if order is None else plans)
        ]
        self.packings = [self._make_packing(bucket) for bucket in self.buckets]
        located = {
            index: (packing, position)
            for packing in self.packings
            for position, index in enumerate(packing.bucket.parameter_indices)
        }
        self.locators = [located[index] for index in range(len(self._parameters))]
        self.small_parameter_buckets = [
            None if packing.is_eager(position) or packing.bucket.sparse else packing.bucket.index
            for packing, position in self.locators
        ]
        self._strategy.lay_out(self.buckets)

    def _make_packing(self, bucket: Bucket) -> Packing:
        if bucket.sparse:
            return SparsePacking(bucket)
        if self._as_view:
            return ViewPacking(bucket, adopts=self._adopts)
        return Packing(bucket)
