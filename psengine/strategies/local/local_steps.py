"""Strategies "local" and "diloco": each replica steps by itself; every H steps a collective synchronises them.

"local" averages parameters (local SGD; after a while of "sync", post-local SGD, Lin et al. 2018, arXiv 1808.07217)::

    rank 0   step ─ step ─ ... ─ step ─┐                        ┌─ step ...
    rank 1   step ─ step ─ ... ─ step ─┴─ average of parameters ┴─ step ...

"diloco" takes an outer Nesterov step with the average of the replicas' differences from what they agreed on last
(Douillard et al. 2023, arXiv 2311.08105); a part of the model at a time, while inner steps go on (Streaming DiLoCo,
Douillard et al. 2025, arXiv 2501.18512).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from psengine.codecs.base import Codec
from psengine.codecs.registry import codec_for, resolve_codec
from psengine.collectives.base import Collective
from psengine.strategies.base import Capabilities
from psengine.strategies.batch_weights import TotalWeight
from psengine.strategies.bucket_sums import BucketSums, make_sum
from psengine.strategies.exchange import BucketExchange, Driver
from psengine.strategies.life_cycle import Replica
from psengine.strategies.local.rounds import OuterStep, Part, RoundOptions, Rounds
from psengine.tensors.bucket import Allocator, Bucket
from psengine.tensors.bucket_plan import plan_buckets
from psengine.tensors.share import Share

FRAGMENT_BUCKET_BYTES = 25 * 1024 * 1024


class LocalSteps(Rounds):
    """Average the parameters of all replicas after every ``every`` steps; needs ``psengine.DistributedOptimizer``.

    Buffers that are floating-point (running statistics) are averaged with the parameters; others become rank 0's. The
    optimizers' state stays each rank's own. Where ``model.batch_weight`` is called in every step, parameters are
    weighed by the samples since their last average; where all ranks have none, they count alike.

    Args:
        every: local steps of a round.
        compress: the codec, or its name, of the differences from the last average; costs a copy of the model. None:
            parameters travel as they are.

    Raises:
        ConfigurationError: an option is out of its range.
    """

    name = "local"
    capabilities = Capabilities(
        keeps_first_layout=True,
        carries_buffers=True,
        averages_gradients=False,
        counts_absent=True,
        steps_alone=True,
    )
    _parts: Sequence[Fragment] = ()

    def __init__(self, every: int = 16, *, compress: str | Codec | None = None) -> None:
        self._rounds = RoundOptions.checked(self.name, every=every)
        self._codec = resolve_codec(compress)
        # With a codec, differences travel: its error must not be that of parameters.
        self._has_outer_step = not self._codec.is_lossless

    # ---- in service --------------------------------------------------------------------------------------------

    @override
    def prepare(self, replica: Replica) -> None:
        super().prepare(replica)
        self._outer = OuterStep(replica.parameters, self._rounds) if self._has_outer_step else None
        self._parts = [
            Fragment(parameters, replica.collective, self._codec, self._outer, self._rounds)
            for parameters in cut(replica.parameters, self._rounds.fragments)
        ]

    @override
    def join(self) -> None:
        """Rank 0's parameters and buffers overwrite everybody's, and a first round begins."""
        self._settle()

    @override
    def _settle(self) -> None:
        super().join()
        super()._settle()

    # ---- stepping ----------------------------------------------------------------------------------------------

    @override
    def shadow_step(self) -> None:
        """A rank without data takes part in the exchanges, with the parameters that it has."""
        self._begin()
        self._count_step()

    @override
    def _end_round(self) -> None:
        """Average the buffers that are floating-point; others become rank 0's."""
        ranks, buffers = self.collective.world_size, [one.detach() for one in self.replica.buffers().values()]
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers if ranks > 1):
            group = [buffer for buffer in buffers if buffer.dtype == dtype]
            if not dtype.is_floating_point:
                self.collective.broadcast(group, 0, what="buffers of local replicas").wait()
                continue
            flat = torch.cat([buffer.reshape(-1) for buffer in group]).mul_(1.0 / ranks)
            self.collective.sum(flat, what="buffers of local replicas")
            for buffer, average in zip(group, flat.split([buffer.numel() for buffer in group]), strict=True):
                buffer.copy_(average.view(buffer.shape))

    @override
    def conclude(self) -> None:
        """End the round under way: all fragments are exchanged now."""
        if not self._is_settled:  # the model was just loaded
            self._settle()
            return
        self._exchange_all()
        self._end_round()

    # ---- checkpoints -------------------------------------------------------------------------------------------

    @override
    def residuals(self) -> dict[str, torch.Tensor]:
        return {name: one for part in self._parts for name, one in part.residuals().items()}

    @override
    def take_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        for part in self._parts:
            part.take_residuals(residuals)


class Diloco(LocalSteps):
    """Step locally; every ``every`` steps an outer Nesterov step with the average of the replicas' differences.

    Costs a copy of the parameters, the outer momentum, and with ``overlap`` a copy of what travels. Buffers are
    averaged and replicas weighed as under "local".

    Args:
        every: local steps of a round.
        fragments: parts of the model that are exchanged in turn, each once in a round.
        overlap: local steps that are taken while a part travels.
        keep: with ``overlap``, the share of its own parameters that a replica keeps when a part arrives.
        outer_lr: learning rate of the outer step.
        outer_momentum: its Nesterov momentum.
        compress: the codec, or its name, of the differences (outer gradients).

    Raises:
        ConfigurationError: an option is out of its range.
    """

    name = "diloco"

    def __init__(
        self,
        every: int = 100,
        *,
        fragments: int = 1,
        overlap: int = 0,
        keep: float = 0.5,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        compress: str | Codec | None = None,
    ) -> None:
        self._rounds = RoundOptions.checked(
            self.name,
            every=every,
            fragments=fragments,
            overlap=overlap,
            keep=keep,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
        )
        self._codec = resolve_codec(compress)
        self._has_outer_step = True


class Fragment(Part):
    """Parameters that replicas synchronise at the same time, over a collective.

    ::

        average                 parameters ─ sum over ranks / W ─► parameters          no codec, no outer step
        with an outer step      see ``OuterStep``

    ``leave`` and ``arrive`` are called on all ranks, in the same order.

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
