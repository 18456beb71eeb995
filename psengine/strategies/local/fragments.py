"""A fragment: parameters that replicas which step by themselves exchange together.

::

    average                 parameters ─ sum over ranks / W ─► parameters          no codec, no outer step
    with an outer step      anchor - parameters ─ codec ─ average ─► outer gradient
                            anchor ─ SGD with the outer gradient ─► anchor ─► parameters

The anchor is what all ranks agreed on last; it has the same bits on each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from psengine.codecs.base import Codec
from psengine.codecs.registry import codec_for
from psengine.collectives.base import Collective
from psengine.strategies.exchange import BucketExchange, Driver
from psengine.strategies.exchanges import Exchanges
from psengine.tensors.bucket import Allocator, Bucket
from psengine.tensors.bucket_plan import plan_buckets
from psengine.tensors.share import WHOLE, Share

FRAGMENT_BUCKET_BYTES = 25 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class OuterStep:
    """The step that all ranks take with the average of their differences: torch.optim.SGD's.

    ``learning_rate=1, momentum=0`` averages parameters.

    Attributes:
        learning_rate: of the outer step.
        momentum: Nesterov's; 0 is plain SGD.
        keep: with overlap, the share of a replica's own parameters that it keeps when a fragment arrives; the rest is
            what all agreed on (alpha in https://arxiv.org/abs/2501.18512).
    """

    learning_rate: float = 1.0
    momentum: float = 0.0
    keep: float = 0.0

    def optimizer(self, anchors: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        """The optimizer of some anchors."""
        return torch.optim.SGD(
            list(anchors), lr=self.learning_rate, momentum=self.momentum, nesterov=self.momentum > 0, foreach=False
        )


class _ParameterBucket(Bucket):
    """Parameters, not gradients, travel in it."""

    def describe(self) -> str:
        return super().describe().replace("gradient bucket", "the round's average of parameter bucket")


class Fragment:
    """See the module's text. ``leave``, ``resend`` and ``arrive`` are called on all ranks, in the same order.

    Args:
        parameters: name to parameter.
        collective: the group of replicas.
        codec: of the differences; lossless ones only without an outer step.
        outer: the outer step; None averages parameters.

    Attributes:
        is_sent: whether what ``leave`` took travels; else ``resend`` sends it, in a training that was loaded.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        collective: Collective,
        codec: Codec,
        outer: OuterStep | None,
    ) -> None:
        def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return collective.allocate(numel, codec_for(codec, dtype).summed_dtype(dtype) or dtype, device)

        self.buckets = parameter_buckets(parameters, allocate)
        self._exchanges = Exchanges(self.buckets, collective, codec)
        self._outer = outer
        self._anchors: list[torch.Tensor] = []
        self._optimizer: torch.optim.Optimizer | None = None
        self._driver = Driver(self._exchange)
        self.is_sent = True
        # What left and has not arrived: differences by bucket and parameter, what they count, and the residuals before.
        # A rank that saves has them at hand. To wait for the average would begin a codec's second operation here alone.
        self._sent: list[list[torch.Tensor]] = []
        self._share = WHOLE
        self._former_residuals: dict[str, torch.Tensor] = {}

    def settle(self) -> None:
        """The parameters are equal on all ranks: they become the anchor, and the outer step begins anew."""
        self._wait()  # what is on its way uses memory of the next exchange
        self._forget_sent()
        self._exchanges.reset()
        if self._outer is None:
            return
        self._anchors = copies_of(self.buckets)
        self._optimizer = self._outer.optimizer(self._anchors)

    # ---- the exchange ------------------------------------------------------------------------------------------

    def leave(self, share: Share, *, overlaps: bool) -> None:
        """Begin to average what the ranks have now.

        Args:
            share: what this rank's counts.
            overlaps: whether a checkpoint may be made before it arrives.
        """
        self._share = share
        if self._outer is None:
            self._sent = [bucket.parameters for bucket in self.buckets]
        else:
            self._sent = [
                list(torch._foreach_sub(bucket.views_of(anchor), bucket.parameters))
                for bucket, anchor in zip(self.buckets, self._anchors, strict=True)
            ]
            self._former_residuals = self._residuals() if overlaps else {}
        self._send()

    def resend(self) -> None:
        """What left before the training was saved leaves again."""
        if not self.is_sent:
            self._send()

    def _send(self) -> None:
        self.is_sent = True
        for bucket, sent in zip(self.buckets, self._sent, strict=True):
            bucket.pack(sent, self._share)
            self._driver.begin(bucket)

    def _exchange(self, bucket: Bucket) -> BucketExchange:
        return self._exchanges[bucket.index].exchange(1.0)

    def _forget_sent(self) -> None:
        self.is_sent, self._sent, self._former_residuals = True, [], {}

    def arrive(self, *, keeps: bool = True) -> None:
        """Wait for the average, and write to the parameters what it leads to; without ``keeps`` nothing but that."""
        averages = self._wait()
        self._forget_sent()
        if self._outer is None:
            for bucket, average in zip(self.buckets, averages, strict=True):
                bucket.unpack(bucket.parameters, average)
            return
        assert self._optimizer is not None, "settled"
        for anchor, average in zip(self._anchors, averages, strict=True):
            anchor.grad = average
        self._optimizer.step()
        for bucket, anchor in zip(self.buckets, self._anchors, strict=True):
            anchor.grad = None
            values = bucket.views_of(anchor)
            if self._outer.keep and keeps:
                torch._foreach_lerp_(bucket.parameters, values, 1.0 - self._outer.keep)
            else:
                torch._foreach_copy_(bucket.parameters, values)

    def _wait(self) -> list[torch.Tensor]:
        """Per bucket the average, flat and in the bucket's dtype."""
        averages = []
        for bucket in self.buckets:
            average = self._driver.result(bucket)
            if average is None:
                continue  # nothing was sent
            if self._outer is not None:  # kept until the outer step; the memory of the result serves the next exchange
                result, average = average, torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
                bucket.unpack(bucket.views_of(average), result)
            averages.append(average)
        return averages

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Copies of what is kept between steps, by kind and name of the parameter; exchanges nothing.

        Of what is on its way this rank's own part is saved, which is sent again.
        """
        kinds: dict[str, list[torch.Tensor]] = {"anchors": self._anchors}
        if self._optimizer is not None:
            slots = [self._optimizer.state[anchor].get("momentum_buffer") for anchor in self._anchors]
            kinds["momenta"] = [slot for slot in slots if slot is not None]
        found: dict[str, Any] = {
            kind: {
                name: view.clone()
                for bucket, flat in zip(self.buckets, flats, strict=True)
                for name, view in zip(bucket.names, bucket.views_of(flat), strict=True)
            }
            for kind, flats in kinds.items()
            if flats
        }
        residuals = self._residuals()
        if self._sent:
            residuals = self._former_residuals
            found["divisor"] = self._share.divisor
            found["sent"] = {
                name: torch.zeros_like(one) if self._share.is_nothing else one.clone()
                for bucket, sent in zip(self.buckets, self._sent, strict=True)
                for name, one in zip(bucket.names, sent, strict=True)
            }
        return found | ({"residuals": residuals} if residuals else {})

    def _residuals(self) -> dict[str, torch.Tensor]:
        """Copies of what the codec left out, by name of the parameter."""
        return {name: residual.clone() for name, residual in self._exchanges.residuals().items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state()`` of a fragment of the same parameters; KeyError where one is missing."""
        self.settle()
        self._exchanges.take(state.get("residuals", {}))
        if self._outer is None:
            return
        assert self._optimizer is not None, "settled"
        for bucket, anchor in zip(self.buckets, self._anchors, strict=True):
            _fill(bucket, anchor, state["anchors"])
            if "momenta" in state:
                momentum = torch.empty_like(anchor)
                _fill(bucket, momentum, state["momenta"])
                self._optimizer.state[anchor]["momentum_buffer"] = momentum
            if "sent" in state:
                flat = torch.empty_like(anchor)
                _fill(bucket, flat, state["sent"])
                self._sent.append(bucket.views_of(flat))
        if "sent" in state:
            self.is_sent, self._share = False, Share(state["divisor"])
            self._former_residuals = {name: one.clone() for name, one in state.get("residuals", {}).items()}


def parameter_buckets(parameters: Mapping[str, torch.nn.Parameter], allocate: Allocator) -> list[Bucket]:
    """Buckets in which parameters travel, in model order; their memory is not that of gradients."""
    names, tensors = list(parameters), list(parameters.values())
    plans = plan_buckets(tensors, [FRAGMENT_BUCKET_BYTES], [False] * len(tensors))
    return [
        _ParameterBucket(index, plan, tensors, names, sparse=False, allocate=allocate)
        for index, plan in enumerate(plans)
    ]


@torch.no_grad()
def copies_of(buckets: Sequence[Bucket]) -> list[torch.Tensor]:
    """Per bucket a flat copy of its parameters."""
    copies = [torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device) for bucket in buckets]
    for bucket, copy in zip(buckets, copies, strict=True):
        torch._foreach_copy_(bucket.views_of(copy), bucket.parameters)
    return copies


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


def _fill(bucket: Bucket, flat: torch.Tensor, values: Mapping[str, Any]) -> None:
    for name, view in zip(bucket.names, bucket.views_of(flat), strict=True):
        view.copy_(values[name])
