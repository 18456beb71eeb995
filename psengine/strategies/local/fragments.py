"""A fragment: parameters that replicas synchronise at the same time, over a collective.

::

    average                 parameters ─ sum over ranks / W ─► parameters          no codec, no outer step
    with an outer step      see ``OuterStep``
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import override

from psengine.codecs.base import Codec
from psengine.codecs.registry import codec_for
from psengine.collectives.base import Collective
from psengine.strategies.batch_weights import TotalWeight
from psengine.strategies.bucket_sums import BucketSums, make_sum
from psengine.strategies.exchange import BucketExchange, Driver
from psengine.strategies.local.rounds import OuterStep, Part, RoundOptions
from psengine.tensors.bucket import Allocator, Bucket
from psengine.tensors.bucket_plan import plan_buckets
from psengine.tensors.share import Share

FRAGMENT_BUCKET_BYTES = 25 * 1024 * 1024


class Fragment(Part):
    """See the module's text. ``leave`` and ``arrive`` are called on all ranks, in the same order.

    Args:
        parameters: name to parameter.
        collective: the group of replicas.
        codec: of the differences; lossless ones only without an outer step.
        outer: the outer step; None averages parameters.
        options: of the rounds.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        collective: Collective,
        codec: Codec,
        outer: OuterStep | None,
        options: RoundOptions,
    ) -> None:
        def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return collective.allocate(numel, codec_for(codec, dtype).summed_dtype(dtype) or dtype, device)

        super().__init__()
        self._buckets = parameter_buckets(parameters, allocate)
        self._collective = collective
        self._sums = BucketSums(make_sum(bucket, collective, codec) for bucket in self._buckets)
        self._outer = outer
        self._options = options
        self._driver = Driver(self._exchange)
        # What left and has not arrived, by name; the samples it counts by; and the residuals before it was sent, None
        # where it is not. A rank that saves has them at hand: to wait for the average would begin a codec's second
        # operation here alone.
        self._sent: dict[str, torch.Tensor] = {}
        self._sent_samples: float | None = None
        self._former_residuals: dict[str, torch.Tensor] | None = None

    @override
    def settle(self) -> None:
        for bucket in self._buckets:
            self._driver.result(bucket)  # what is on its way uses memory of the next exchange
        self._forget_sent()
        self._sums.reset()
        super().settle()

    def _forget_sent(self) -> None:
        self._sent, self._former_residuals = {}, None

    # ---- the exchange ------------------------------------------------------------------------------------------

    @override
    def leave(self) -> None:
        self._sent_samples = self.samples
        for bucket in self._buckets:
            sent = bucket.parameters if self._outer is None else self._outer.differences(bucket)
            self._sent |= zip(bucket.names, sent, strict=True)
        self._send()

    def _share(self) -> Share:
        """What this rank counts among those that send; all alike where nobody has samples."""
        if self._sent_samples is not None and self._buckets:
            total = TotalWeight(self._sent_samples, self._collective, self._buckets[0].device)
            if total.value:
                return total.share
        return Share(self._collective.world_size)

    def _send(self) -> None:
        # Without an overlap it arrives in the same step, and nobody saves in between.
        former = self._sums.residuals() if self._options.overlap else {}
        self._former_residuals = {name: one.clone() for name, one in former.items()}
        self._sums.begin()
        share = self._share()
        for bucket in self._buckets:
            bucket.pack([self._sent[name] for name in bucket.names], share)
            self._driver.begin(bucket)

    def _exchange(self, bucket: Bucket) -> BucketExchange:
        return self._sums[bucket.index].exchange(1.0)

    @override
    def arrive(self, *, keeps: bool = True) -> None:
        if self._former_residuals is None:  # it left before the training was saved
            self._send()
        for bucket in self._buckets:
            average = self._driver.result(bucket)
            assert average is not None, "a collective returns what it reduced"
            if self._outer is None:
                bucket.unpack(bucket.parameters, average)
                continue
            self._outer.take(bucket, average)
            if keeps and self._options.overlap and self._options.keep:
                torch._foreach_lerp_(bucket.parameters, self._outer.anchors_of(bucket), 1.0 - self._options.keep)
            else:
                torch._foreach_copy_(bucket.parameters, self._outer.anchors_of(bucket))
        self._forget_sent()

    # ---- checkpoints -------------------------------------------------------------------------------------------

    @override
    def state(self) -> dict[str, Any]:
        """Of what is on its way this rank's own part is saved, which is sent again."""
        if self.due is None:
            return super().state()
        sent = {name: one.clone() for name, one in self._sent.items()}
        return super().state() | {"sent": sent, "sent_samples": self._sent_samples}

    @override
    def load(self, state: Mapping[str, Any]) -> None:
        self.settle()
        super().load(state)
        if self.due is not None:
            self._sent = {name: one.to(self._buckets[0].device, copy=True) for name, one in state["sent"].items()}
            self._sent_samples = state["sent_samples"]

    def residuals(self) -> dict[str, torch.Tensor]:
        """What the codec left out before what travels, by name of the parameter; not to be written."""
        return self._sums.residuals() if self._former_residuals is None else self._former_residuals

    def take_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Go on with what ``residuals`` returned."""
        self._sums.take(residuals)


def parameter_buckets(parameters: Mapping[str, torch.nn.Parameter], allocate: Allocator) -> list[Bucket]:
    """Buckets in which parameters travel, in model order; their memory is not that of gradients."""
    names, tensors = list(parameters), list(parameters.values())
    plans = plan_buckets(tensors, [FRAGMENT_BUCKET_BYTES], [False] * len(tensors))
    return [Bucket(index, plan, tensors, names, sparse=False, allocate=allocate) for index, plan in enumerate(plans)]


def cut(parameters: Mapping[str, torch.nn.Parameter], count: int) -> list[dict[str, torch.nn.Parameter]]:
    """Whole parameters, in model order, in ``count`` parts of about equal numbers of elements; some may be empty."""
    total = sum(parameter.numel() for parameter in parameters.values())
    parts: list[dict[str, torch.nn.Parameter]] = [{} for _ in range(count)]
    before = 0
    for name, parameter in parameters.items():
        middle = before + parameter.numel() / 2
        parts[min(count - 1, int(middle * count / max(1, total)))][name] = parameter
        before += parameter.numel()
    return parts
