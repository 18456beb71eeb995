"""What strategies compute, for one process that holds all replicas::

    before_forward ─ each replica: forward, backward ─ before_step ─ each optimizer: step ─ after_step

The rules share with the strategies the cut of a model into fragments, buckets and chunks, and nothing else. Papers:
Lin et al. 2018 (arXiv 1808.07217), Douillard et al. 2023 (2311.08105), Douillard et al. 2025 (2501.18512).
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from oracles.averages import (
    AtServers,
    Average,
    Over,
    OverCollective,
    Part,
    elements,
    gather,
    in_memory_order,
    scatter,
    whole,
)
from oracles.codec_values import Sender, is_covered, sender
from oracles.payloads import CASTS
from psengine.codecs.base import Codec
from psengine.codecs.identity import IDENTITY
from psengine.codecs.registry import resolve_codec
from psengine.strategies.local.rounds import FRAGMENT_BUCKET_BYTES, cut
from psengine.strategies.registry import resolve_strategy
from psengine.tensors.bucket_plan import plan_buckets

Replicas: TypeAlias = Sequence[torch.nn.Module]
# The parts that travel together, by bucket or chunk, in the last step of the training that is compared with the rule;
# the same object until they are laid out anew.
Layout: TypeAlias = Callable[[], Sequence[Sequence[Part]]]


class Rule:
    """Changes ``replicas``, equal at the start, as the strategy does; by default not at all.

    ``exchanges_buffers``: the wrapper's ``forward_sync_buffers``.
    """

    exchanges_buffers = True

    def before_forward(self) -> None:
        """Replicas begin a step."""

    def before_step(self) -> None:
        """All replicas have this step's gradients, which may be changed."""

    def after_step(self) -> None:
        """All optimizers have stepped."""


def rule_of(specification: str, replicas: Replicas, layout: Layout) -> Rule:
    """The rule of a strategy whose result does not depend on when workers arrive."""
    strategy = resolve_strategy(specification)
    given = dict(strategy.options)
    codec = resolve_codec(given.pop("compress", None))
    if strategy.name in ("sync", "sync-server", "async"):
        make = {"sync": CollectiveRule, "sync-server": ServersRule, "async": AsyncRule}[strategy.name]
        return make(replicas, layout, codec)
    if strategy.name == "diloco-server":
        assert given["quorum"] == len(replicas), "a merge of fewer workers depends on when they arrive"
        kept = {name: given[name] for name in ("every", "outer_lr", "outer_momentum")}
        return LocalRule(replicas, RuleOptions(over=AtServers(answers=False), codec=codec, **kept), layout)
    # With a codec parameters are averaged as a step on their differences, which is how they travel.
    differences = {} if codec.is_lossless else {"outer_lr": 1.0, "outer_momentum": 0.0}
    return LocalRule(replicas, RuleOptions(codec=codec, **(differences | given)), layout)


class CodecRule(Rule):
    """Averages the gradients of equal replicas.

    Args:
        replicas: the modules; their gradients are mutated.
        layout: of the training that is compared, in its last step: blocks and slices follow from it.
        codec: of its strategy.
    """

    over: ClassVar[Over]
    # Whether what was sent of a parameter that no replica used counts.
    counts_unused: ClassVar[bool]

    def __init__(self, replicas: Replicas, layout: Layout, codec: Codec) -> None:
        self._replicas, self._layout, self._codec = replicas, layout, codec
        # As ``layout`` returned them, and the average of each.
        self._buckets: Sequence[Sequence[Part]] = []
        self._averages: list[Average] = []

    @torch.no_grad()
    def before_step(self) -> None:
        buckets = self._layout()
        if buckets is not self._buckets:
            self._lay_out(buckets)
        names = list(dict.fromkeys(part.name for bucket in buckets for part in bucket))
        gradients = {name: [replica.get_parameter(name).grad for replica in self._replicas] for name in names}
        sparse = {name for name, own in gradients.items() if any(one is not None and one.is_sparse for one in own)}
        used = {name for name, own in gradients.items() if any(one is not None for one in own)} - sparse
        sent = [
            {name: elements(own[rank], self._parameter(name)) for name, own in gradients.items() if name not in sparse}
            for rank in range(len(self._replicas))
        ]
        arrived = {name: torch.empty_like(flat) for name, flat in sent[0].items()}
        for bucket, average in zip(buckets, self._averages, strict=True):
            if bucket[0].name in sparse:
                self._average_sparse(bucket[0].name)
                continue
            values = average(self.over.addends([gather(flats, bucket) for flats in sent]))
            scatter(values, bucket, arrived)
            ends = list(itertools.accumulate(part.numel for part in bucket))
            for part, end in zip(bucket, ends, strict=True):
                if part.name not in used and not self.counts_unused:
                    average.spare(end - part.numel, end)
        for name in used:
            self._write(name, arrived[name])

    def _parameter(self, name: str) -> torch.nn.Parameter:
        return self._replicas[0].get_parameter(name)

    def _average_sparse(self, name: str) -> None:
        alike = [replica.get_parameter(name) for replica in self._replicas]
        dense = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in alike]
        average = self.over.average(IDENTITY, len(dense), dense[0].dtype)(self.over.addends(dense))
        for p in alike:
            p.grad = average.to_sparse(1)

    def _write(self, name: str, flat: Tensor) -> None:
        for replica in self._replicas:
            parameter = replica.get_parameter(name)
            values = in_memory_order(flat.clone(), parameter)
            if parameter.grad is None:
                parameter.grad = values
            else:
                parameter.grad.copy_(values)

    def _lay_out(self, buckets: Sequence[Sequence[Part]]) -> None:
        """Residuals move with their parameters."""
        residuals: list[dict[Part, Tensor]] = [{} for _ in self._replicas]
        for bucket, average in zip(self._buckets, self._averages, strict=True):
            average.lay_out_anew()
            for kept, one in zip(residuals, average.up, strict=False):
                if one.residual is not None:
                    kept.update(zip(bucket, one.residual.split([part.numel for part in bucket]), strict=True))
        self._buckets, self._averages = buckets, []
        for bucket in buckets:
            dtype = self._parameter(bucket[0].name).dtype
            average = self.over.average(self._codec, len(self._replicas), dtype)
            self._averages.append(average)
            for kept, one in zip(residuals, average.up, strict=False):
                if bucket[0] in kept:
                    one.residual = torch.cat([kept[part] for part in bucket])

    def _copy_buffers(self) -> None:
        if not self.exchanges_buffers:
            return
        for buffers in zip(*(replica.buffers() for replica in self._replicas), strict=True):
            for buffer in buffers[1:]:
                buffer.copy_(buffers[0])


class CollectiveRule(CodecRule):
    """Of "sync"."""

    over = OverCollective()
    counts_unused = False

    @torch.no_grad()
    def before_forward(self) -> None:
        """Replicas have rank 0's buffers, as native DDP's."""
        self._copy_buffers()


class ServersRule(CodecRule):
    """Of "sync-server", whose buckets are the chunks that servers average."""

    over = AtServers()
    counts_unused = True

    @torch.no_grad()
    def before_step(self) -> None:
        """Buffers travel with gradients: all replicas have rank 0's after backward."""
        super().before_step()
        self._copy_buffers()


class AsyncRule(Rule):
    """Of "async" with one worker, whose optimizer is the server's.

    worker   gradient ─ + residual ─ what arrives ─► server: the optimizer steps its weights
             held += what arrives ◄─ weights - held ◄┘         the worker trains on what it holds

    The first answer is whole weights. The server knows what the worker holds, so what a difference leaves out is part
    of the next one, without a residual. A cast sends the weights themselves.

    Args:
        replicas: one module; its parameters are mutated, its gradients are those of the server during the step.
        layout: of the training that is compared: blocks follow from its chunks.
        codec: of its strategy.
    """

    def __init__(self, replicas: Replicas, layout: Layout, codec: Codec) -> None:
        (self._replica,) = replicas
        self._codec = codec
        self._parameters = {name: one for name, one in self._replica.named_parameters() if one.requires_grad}
        self._chunks = [_Chunk(parts, self._replica, codec) for parts in layout()]
        self._weights = self._elements()
        self._own_gradients: dict[str, Tensor | None] = {}

    def _elements(self) -> dict[str, Tensor]:
        return {name: elements(one, one) for name, one in self._parameters.items()}

    def _load(self, flats: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(in_memory_order(flats[name], parameter))

    @torch.no_grad()
    def before_step(self) -> None:
        """The server's weights, and the gradients that arrive, take the places of the worker's."""
        self._own_gradients = {name: one.grad for name, one in self._parameters.items()}
        flats = {name: elements(one.grad, one) for name, one in self._parameters.items()}
        for chunk in self._chunks:
            # A chunk without any gradient is not sent.
            if any(self._own_gradients[part.name] is not None for part in chunk.parts):
                values = gather(flats, chunk.parts)
                scatter(chunk.gradients(values).to(values.dtype), chunk.parts, flats)
        self._load(self._weights)
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                parameter.grad = in_memory_order(flats[name], parameter)

    @torch.no_grad()
    def after_step(self) -> None:
        """The worker has its gradients again, and the weights that arrive."""
        self._weights = self._elements()
        flats = self._elements()
        for chunk in self._chunks:
            scatter(chunk.answer(gather(self._weights, chunk.parts)), chunk.parts, flats)
        self._load(flats)
        for name, parameter in self._parameters.items():
            parameter.grad = self._own_gradients[name]


class _Chunk:
    """What travels up and down of some parts."""

    def __init__(self, parts: Sequence[Part], replica: torch.nn.Module, codec: Codec) -> None:
        self.parts = parts
        self._codec = codec
        self._dtype = replica.get_parameter(parts[0].name).dtype
        self.gradients = self._new_sender()
        self._held: Tensor | None = None

    def _new_sender(self) -> Sender:
        return sender(self._codec, self._dtype)

    def answer(self, weights: Tensor) -> Tensor:
        """What the worker holds after an answer; ``weights`` are the server's."""
        if self._codec.name in CASTS or not is_covered(self._codec, self._dtype):
            return self._new_sender()(weights)
        wide = weights.to(torch.promote_types(self._dtype, torch.float32))
        # A new sender has no residual.
        self._held = wide if self._held is None else self._held + self._new_sender()(wide - self._held)
        return self._held.to(self._dtype)


@dataclass(frozen=True, kw_only=True)
class RuleOptions:
    """The strategies' options; ``outer_lr=None`` averages parameters. ``over``: where values are averaged."""

    every: int
    fragments: int = 1
    overlap: int = 0
    keep: float = 0.0
    outer_lr: float | None = None
    outer_momentum: float = 0.0
    over: Over = field(default_factory=OverCollective)
    codec: Codec = IDENTITY


class LocalRule(Rule):
    """Applies the rule to equal replicas.

    Args:
        replicas: the modules; mutated.
        options: of the rule.
        layout: of the training that is compared: the chunks that servers average and step. Over a collective the
            parameters of a fragment travel in buckets that the rule plans itself.
    """

    def __init__(self, replicas: Replicas, options: RuleOptions, layout: Layout) -> None:
        self._replicas = replicas
        self._options = options
        self._step = 0
        # By fragment: what travels together.
        self._groups: list[list[Sequence[Part]]] = []
        trained = {name: one for name, one in replicas[0].named_parameters() if one.requires_grad}
        for fragment in cut(trained, options.fragments):
            names, tensors = list(fragment), list(fragment.values())
            plans = plan_buckets(tensors, [FRAGMENT_BUCKET_BYTES], [False] * len(tensors))
            self._groups.append([whole([names[index] for index in plan], replicas[0]) for plan in plans])
        if isinstance(options.over, AtServers):
            self._groups = [list(layout())]
        # By fragment and group.
        self._averages = [[self._average_of(parts) for parts in groups] for groups in self._groups]
        self._momenta: list[list[torch.Tensor | None]] = [[None] * len(groups) for groups in self._groups]
        # (step at which they are used, fragment, the averages of its groups)
        self._sent: list[tuple[int, int, list[torch.Tensor]]] = []
        self._agreed = [[self._values(self._replicas[0], parts) for parts in groups] for groups in self._groups]

    def _values(self, replica: torch.nn.Module, parts: Sequence[Part]) -> torch.Tensor:
        flats = {part.name: replica.get_parameter(part.name) for part in parts}
        return gather({name: elements(parameter, parameter) for name, parameter in flats.items()}, parts)

    @torch.no_grad()
    def after_step(self) -> None:
        options = self._options
        self._step += 1
        step = self._step
        for fragment, groups in enumerate(self._groups):
            if step % options.every == (fragment + 1) * options.every // options.fragments % options.every:
                averages = []
                for group, parts in enumerate(groups):
                    values = [self._values(replica, parts) for replica in self._replicas]
                    if options.outer_lr is not None:
                        values = [self._agreed[fragment][group] - value for value in values]
                    averages.append(self._averages[fragment][group](options.over.addends(values)))
                self._sent.append((step + options.overlap, fragment, averages))
        for entry in [entry for entry in self._sent if entry[0] == step]:
            self._sent = [one for one in self._sent if one is not entry]
            for group, average in enumerate(entry[2]):
                self._use(entry[1], group, average)
        # Over servers replicas keep their own buffers.
        if step % options.every == 0 and self.exchanges_buffers and not isinstance(options.over, AtServers):
            self._average_buffers()

    def _average_of(self, parts: Sequence[Part]) -> Average:
        dtype = self._replicas[0].get_parameter(parts[0].name).dtype
        return self._options.over.average(self._options.codec, len(self._replicas), dtype)

    def _mean(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        over = self._options.over
        return over.average(IDENTITY, len(values), values[0].dtype)(over.addends(values))

    def _use(self, fragment: int, group: int, average: torch.Tensor) -> None:
        options = self._options
        if options.outer_lr is None:
            agreed, keep = average, 0.0
        else:
            agreed, keep = self._outer_step(fragment, group, average), options.keep if options.overlap else 0.0
        self._agreed[fragment][group] = agreed
        parts = self._groups[fragment][group]
        for replica in self._replicas:
            parameters = {part.name: replica.get_parameter(part.name) for part in parts}
            flats = {name: elements(parameter, parameter) for name, parameter in parameters.items()}
            scatter(agreed, parts, flats)
            for name, parameter in parameters.items():
                values = in_memory_order(flats[name], parameter)
                parameter.copy_(torch.lerp(parameter, values, 1.0 - keep) if keep else values)

    def _outer_step(self, fragment: int, group: int, gradient: torch.Tensor) -> torch.Tensor:
        """Nesterov's step of each parameter, as Sutskever et al. write it and torch.optim.SGD takes it. torch rounds
        the last elements of a 16-bit tensor otherwise.
        """
        rate, momentum = self._options.outer_lr, self._options.outer_momentum
        assert rate is not None, "checked by the caller"
        sizes = [part.numel for part in self._groups[fragment][group]]
        if momentum:
            last = self._momenta[fragment][group]
            velocity = (
                gradient.clone()
                if last is None
                else _of_each(last, sizes, gradient, lambda v, g: v.mul(momentum).add(g))
            )
            self._momenta[fragment][group] = velocity
            gradient = _of_each(gradient, sizes, velocity, lambda g, v: g.add(v, alpha=momentum))
        return _of_each(self._agreed[fragment][group], sizes, gradient, lambda a, g: a.add(g, alpha=-rate))

    def _average_buffers(self) -> None:
        """The mean of those with fractions; of others the first replica's."""
        for dtype in dict.fromkeys(buffer.dtype for buffer in self._replicas[0].buffers()):
            group = [[b for b in replica.buffers() if b.dtype == dtype] for replica in self._replicas]
            flats = [torch.cat([buffer.detach().reshape(-1) for buffer in buffers]) for buffers in group]
            agreed = self._mean(flats) if dtype.is_floating_point else flats[0]
            for buffers in group:
                for buffer, value in zip(buffers, agreed.split([b.numel() for b in buffers]), strict=True):
                    buffer.copy_(value.view(buffer.shape))


def _of_each(
    one: torch.Tensor,
    sizes: Sequence[int],
    other: torch.Tensor,
    make: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """What ``make`` makes of pairs of pieces that are tensors by themselves."""
    pairs = zip(one.split(list(sizes)), other.split(list(sizes)), strict=True)
    return torch.cat([make(a.clone(), b.clone()) for a, b in pairs])
