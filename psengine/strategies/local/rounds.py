"""Strategies "local" and "diloco": each replica steps by itself; every H steps a collective synchronises them.

"local" averages parameters (local SGD; after a while of "sync", post-local SGD, Lin et al. 2018, arXiv 1808.07217)::

    rank 0   step ─ step ─ ... ─ step ─┐                        ┌─ step ...
    rank 1   step ─ step ─ ... ─ step ─┴─ average of parameters ┴─ step ...

"diloco" takes an outer Nesterov step with the average of the replicas' differences from what they agreed on last
(Douillard et al. 2023, arXiv 2311.08105); a part of the model at a time, while inner steps go on (Streaming DiLoCo,
Douillard et al. 2025, arXiv 2501.18512).

Both are rounds, in which parts of the model are synchronised in turn; so is "diloco-server", where servers do that.
``every=6, fragments=3, overlap=1``::

    step       1   2   3   4   5   6   7   8
    part 0         ├───┤                   ├───    leaves after step 2, arrives after step 3
    part 1                 ├───┤
    part 2                         ├───┤
    buffers                        │

A round is counted in calls of ``optimizer.step()``; a step that this replica's GradScaler leaves out counts too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from msgspec import Meta
from typing_extensions import Self, override

from psengine.codecs.base import Codec
from psengine.codecs.registry import codec_for, resolve_codec
from psengine.collectives.base import Collective
from psengine.errors import ConfigurationError, ProtocolError
from psengine.protocol.bodies import convert
from psengine.strategies.base import Capabilities, StepStrategy
from psengine.strategies.bucket_sums import BucketSums, TotalWeight, make_sum
from psengine.strategies.exchange import BucketExchange, Driver, Step
from psengine.strategies.life_cycle import Replica
from psengine.tensors.bucket import Allocator, Bucket
from psengine.tensors.bucket_plan import plan_buckets
from psengine.tensors.share import Share

FRAGMENT_BUCKET_BYTES = 25 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class RoundOptions:
    """When replicas synchronise, and by which outer step; steps are counted from 1.

    Attributes:
        every: local steps of a round, in which each part is exchanged once.
        fragments: number of parts of the model that are exchanged in turn.
        overlap: local steps that are taken while a part travels.
        keep: with ``overlap``, the share of its own parameters that a replica keeps when a part arrives; the rest is
            what all agreed on (alpha in https://arxiv.org/abs/2501.18512).
        outer_lr: learning rate of the outer step; 1 without momentum averages parameters.
        outer_momentum: its Nesterov momentum; 0 is plain SGD.
    """

    every: Annotated[int, Meta(ge=1)]
    fragments: Annotated[int, Meta(ge=1)] = 1
    overlap: Annotated[int, Meta(ge=0)] = 0
    keep: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    outer_lr: Annotated[float, Meta(gt=0, lt=1e6)] = 1.0
    outer_momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.0

    def __post_init__(self) -> None:
        """Check what belongs together."""
        if self.fragments > self.every:
            raise ValueError(
                f"a step exchanges one fragment (expected at most fragments={self.every}, got {self.fragments})"
            )
        if self.overlap >= self.every:
            raise ValueError(
                f"a fragment arrives before it leaves again (expected overlap < every={self.every}, got {self.overlap})"
            )

    @classmethod
    def checked(cls, strategy: str, **options: Any) -> Self:
        """The options of ``strategy``.

        Raises:
            ConfigurationError: one is out of its range, or they do not fit together.
        """
        try:
            made: Self = convert(options, cls, f"strategy {strategy!r}")
        except ProtocolError as error:
            raise ConfigurationError(f"{error}. Fix: give other values, or leave the options out") from None
        return made

    def leaving(self, step: int) -> int | None:
        """The part that leaves after ``step``."""
        places = [(index + 1) * self.every // self.fragments % self.every for index in range(self.fragments)]
        return places.index(step % self.every) if step % self.every in places else None


class OuterStep:
    """The outer step of DiLoCo: torch.optim.SGD with the average of the replicas' differences.

    ::

        anchor - parameters ─ codec ─ average ─► outer gradient
        anchor ─ SGD with the outer gradient ─► anchor ─► parameters

    The anchors of ``parameters``, given by name, are what replicas agreed on last; they have the same bits on all.

    Attributes:
        anchors: what replicas agreed on last, by name of the parameter.
        optimizer: of the anchors.
    """

    @torch.no_grad()
    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], options: RoundOptions) -> None:
        self._parameters: list[torch.Tensor] = list(parameters.values())
        self.anchors = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        momentum = options.outer_momentum
        self.optimizer = torch.optim.SGD(
            list(self.anchors.values()), options.outer_lr, momentum, nesterov=momentum > 0, foreach=False
        )

    def settle(self) -> None:
        """The parameters become the anchors, and the momentum begins anew."""
        self.follow()
        self.optimizer.state.clear()

    def follow(self) -> None:
        """The parameters become the anchors."""
        torch._foreach_copy_(list(self.anchors.values()), self._parameters)

    def anchors_of(self, bucket: Bucket) -> list[torch.Tensor]:
        """The anchors of a bucket's parameters."""
        return [self.anchors[name] for name in bucket.names]

    def differences(self, bucket: Bucket) -> list[torch.Tensor]:
        """How far a bucket's parameters went from their anchors."""
        return list(torch._foreach_sub(self.anchors_of(bucket), bucket.parameters))

    def take(self, bucket: Bucket, average: torch.Tensor) -> None:
        """Step the anchors of a bucket's parameters with the average of differences, laid out like its memory."""
        anchors = self.anchors_of(bucket)
        gradients = [torch.empty_like(anchor) for anchor in anchors]
        bucket.unpack(gradients, average)
        for anchor, gradient in zip(anchors, gradients, strict=True):
            anchor.grad = gradient
        self.optimizer.step()
        for anchor in anchors:
            anchor.grad = None

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Copies of anchors and momenta, by name of the parameter."""
        slots = {name: self.optimizer.state.get(one, {}).get("momentum_buffer") for name, one in self.anchors.items()}
        return {
            "anchors": {name: anchor.clone() for name, anchor in self.anchors.items()},
            "momenta": {name: slot.clone() for name, slot in slots.items() if slot is not None},
        }

    def load(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Continue from ``state()``; KeyError where a parameter has none."""
        self.optimizer.state.clear()
        for name, anchor in self.anchors.items():
            anchor.copy_(state["anchors"][name])
            if name in state["momenta"]:
                momentum = torch.empty_like(anchor).copy_(state["momenta"][name])
                self.optimizer.state[anchor]["momentum_buffer"] = momentum


class ScaledStep:
    """The steps of ``optimizer`` under ``torch.amp.GradScaler``, which calls them always from now on.

    By default the scaler does not call ``step`` at all where this rank's gradients overflowed; no other rank would
    know. An optimizer whose ``_step_supports_amp_scaling`` is True is always called, with ``grad_scale`` and
    ``found_inf``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        # A fused optimizer's kernel unscales, and leaves out the step, by itself.
        self._scales_itself = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    def take(self, local_step: Callable[[], Any]) -> Any:
        """``local_step()``; nothing where the scaler found a gradient that is not finite."""
        found_inf: torch.Tensor | None = getattr(self.optimizer, "found_inf", None)
        if found_inf is None or self._scales_itself:
            return local_step()
        scale: torch.Tensor | None = getattr(self.optimizer, "grad_scale", None)
        # torch's plain optimizers refuse to step with them; the scaler deletes both afterwards.
        self.optimizer.grad_scale = self.optimizer.found_inf = None  # type: ignore[attr-defined]
        if bool(found_inf):
            return None
        if scale is not None:  # None: the script has called scaler.unscale_
            factor = scale.double().reciprocal().float().item()
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)
        return local_step()


class Part(ABC):
    """Parameters that replicas synchronise at the same time.

    Attributes:
        steps: how many this replica took since the part left last.
        samples: of these steps; None where nobody calls ``batch_weight``.
        due: after which step it arrives; None while it does not travel.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.samples: float | None = None
        self.due: int | None = None

    @abstractmethod
    def leave(self) -> None:
        """Begin to exchange what the replicas have now."""

    @abstractmethod
    def arrive(self, *, keeps: bool = True) -> None:
        """Wait, and write what was agreed on to the parameters; with ``keeps`` a share of this replica's own stays."""

    def settle(self) -> None:
        """A first round begins with the parameters, which are equal."""
        self.steps, self.samples, self.due = 0, None, None

    def state(self) -> dict[str, Any]:
        """Copies of what is kept between steps; exchanges nothing."""
        return {"steps": self.steps, "samples": self.samples, "due": self.due}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state()`` of a part of the same parameters; KeyError where it is of another."""
        self.steps, self.samples, self.due = state["steps"], state["samples"], state["due"]


class Rounds(StepStrategy[ScaledStep]):
    """A strategy in which replicas step without communication; a subclass sets ``_rounds`` and ``_parts``."""

    _rounds: RoundOptions
    _parts: Sequence[Part] = ()
    # The step with the average of differences; None where parameters are averaged.
    _outer: OuterStep | None = None
    _steps = 0
    # Of the coming backward.
    _weight: float | None = None
    # Whether replicas are in rounds; else the next step begins a first one.
    _is_settled = False

    def _end_round(self) -> None:
        """All parts have left since the last call."""

    @override
    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps of ``optimizer`` are counted.

        Raises:
            ConfigurationError: a second optimizer.
        """
        super().bind(optimizer)
        self.stepper = ScaledStep(optimizer)

    @override
    def close(self) -> None:
        super().close()
        self._outer, self._parts, self._is_settled = None, (), False

    # ---- stepping ----------------------------------------------------------------------------------------------

    @override
    def weigh(self, weight: float | None) -> None:
        self._weight = weight  # several forwards may come before a backward

    @override
    def begin(self, step: Step) -> Share:
        """A part counts by the samples since it left last."""
        if self._weight is not None:
            for part in self._parts:
                part.samples = self._weight + (part.samples or 0.0)
        return super().begin(step)

    @override
    def step(self, local_step: Callable[[], Any], closure: Callable[[], Any] | None = None) -> Any:
        """Step locally; exchange what is due after this step."""
        stepper = self.bound()
        self._begin()
        result = stepper.take(local_step)
        self._count_step()
        return result

    def _begin(self) -> None:
        """Begin a first round where the model was loaded without this strategy's state."""
        if not self._is_settled:
            self._settle()

    @torch.no_grad()
    def _settle(self) -> None:
        """Begin a first round."""
        if self._outer is not None:
            self._outer.settle()
        for part in self._parts:
            part.settle()
        self._steps, self._is_settled = 0, True

    @torch.no_grad()
    def _count_step(self) -> None:
        self._steps += 1
        for part in self._parts:
            part.steps += 1
        leaving = self._rounds.leaving(self._steps)
        if leaving is not None:
            self._leave(self._parts[leaving])
        for part in self._parts:
            if part.due == self._steps:
                self._arrive(part)
        if self._steps % self._rounds.every == 0:
            self._end_round()

    def _leave(self, part: Part) -> None:
        part.leave()
        part.steps, part.samples, part.due = 0, None, self._steps + self._rounds.overlap

    def _arrive(self, part: Part, *, keeps: bool = True) -> None:
        part.due = None
        part.arrive(keeps=keeps)

    @torch.no_grad()
    def _exchange_all(self) -> None:
        """Exchange all parts now, whatever the schedule says."""
        for part in self._parts:
            if part.due is not None:
                self._arrive(part)
        for part in self._parts:
            self._leave(part)
        for part in self._parts:
            self._arrive(part, keeps=False)

    # ---- checkpoints -------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """How far the round is, what replicas agreed on last, the outer step's momentum, and what travels."""
        return {
            "residuals": super().state_dict(),
            "steps": self._steps,
            "parts": [part.state() for part in self._parts],
            "outer": {} if self._outer is None else self._outer.state(),
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved_parts = state.get("parts", ())
        if len(saved_parts) != len(self._parts):
            raise ConfigurationError(
                f"the saved state is not one of {self!r} (expected {len(self._parts)} parts, got {len(saved_parts)})"
            )
        try:
            with torch.no_grad():
                if self._outer is not None:
                    self._outer.load(state["outer"])
                for part, saved in zip(self._parts, saved_parts, strict=True):
                    part.load(saved)
            super().load_state_dict(state["residuals"])
            self._steps, self._is_settled = state["steps"], True
        except KeyError as error:
            raise ConfigurationError(
                f"the saved state is not one of {self!r} (expected what it keeps of each parameter, got nothing for"
                f" {error}). Fix: use the same options, or leave out the strategy's state."
            ) from error

    @override
    def restart(self) -> None:
        """At the next step a first round begins."""
        self._is_settled = False


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

    @property
    def equal_every(self) -> int:  # type: ignore[override]
        """Replicas are equal between two rounds."""
        return self._rounds.every

    @override
    def equal_after(self, exchanges: int) -> int | None:
        """Where parts of the model travel in turn, replicas are never equal as a whole."""
        is_whole = self._rounds.fragments == 1 and self._rounds.overlap == 0 and self._is_settled
        return self._steps if is_whole and self._steps % self._rounds.every == 0 else None

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
