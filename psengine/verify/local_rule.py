"""What "local" and "diloco" compute, and the same over servers, for one process that holds all replicas.

An oracle: it shares the cut of a model into fragments and buckets with the strategies, and nothing else. Papers:
Lin et al. 2018 (arXiv 1808.07217), Douillard et al. 2023 (2311.08105), Douillard et al. 2025 (2501.18512).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from psengine.codecs.base import Codec
from psengine.codecs.identity import IDENTITY
from psengine.codecs.registry import resolve_codec
from psengine.errors import ConfigurationError
from psengine.strategies.local.fragments import FRAGMENT_BUCKET_BYTES, cut
from psengine.tensors.bucket_plan import plan_buckets
from psengine.verify.averages import AtServers, Average, Over, OverCollective
from psengine.verify.codec_values import check_has_rule
from psengine.verify.parts import Part, elements, gather, in_memory_order, pieces_of, scatter, whole
from psengine.verify.rule import Layout, MakeRule, Replicas, Rule

COLLECTIVE = OverCollective()


@dataclass(frozen=True, kw_only=True)
class RuleOptions:
    """The strategies' options. ``outer_lr=None`` averages parameters.

    Attributes:
        over: where values are averaged.
        codec: of what travels; it has a rule, see ``codec_values.check_has_rule``.
        buffers: what replicas do with their buffers at the end of a round: "average", or keep their "own".
    """

    every: int
    fragments: int = 1
    overlap: int = 0
    keep: float = 0.0
    outer_lr: float | None = None
    outer_momentum: float = 0.0
    over: Over = COLLECTIVE
    codec: Codec = IDENTITY
    buffers: str = "average"


# Averages of parameters, as a step on their differences, which is how they travel under a codec.
AS_DIFFERENCES = {"outer_lr": 1.0, "outer_momentum": 0.0}


def of_collective(strategy: Any, world_size: int) -> MakeRule:
    """The rule of "local" and "diloco".

    Raises:
        ConfigurationError: the codec has no rule.
    """
    given = strategy.__getstate__()  # the arguments that make an equal strategy
    codec = _codec_of(given)
    return _maker(RuleOptions(codec=codec, **given if codec.is_lossless else AS_DIFFERENCES | given))


def of_servers(strategy: Any, world_size: int) -> MakeRule:
    """The rule of "diloco-server".

    Raises:
        ConfigurationError: the codec has no rule, or a merge does not wait for all workers, so its result follows from
            when they arrive.
    """
    given = strategy.__getstate__()
    codec, every = _codec_of(given), given["every"]
    if given["quorum"] < world_size:
        raise ConfigurationError(
            "what a merge of a part of the workers computes depends on when they arrive (expected a quorum of all"
            f" {world_size} ranks, got quorum={given['quorum']}). Fix: quorum={world_size}"
        )
    outer = {name: given[name] for name in AS_DIFFERENCES}
    return _maker(RuleOptions(every=every, over=AtServers(answers=False), codec=codec, buffers="own", **outer))


def _codec_of(given: dict[str, Any]) -> Codec:
    codec = resolve_codec(given.pop("compress"))
    check_has_rule(codec)
    return codec


def _maker(options: RuleOptions) -> MakeRule:
    return lambda replicas, layout: LocalRule(replicas, options, layout)


class LocalRule(Rule):
    """Applies the rule to equal replicas.

    Args:
        replicas: the modules; mutated.
        options: of the rule.
        layout: of the training that is compared: the chunks that servers average and step. Over a collective the
            parameters of a fragment travel in buckets that the rule plans itself.
    """

    def __init__(self, replicas: Replicas, options: RuleOptions, layout: Layout | None = None) -> None:
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
        if isinstance(options.over, AtServers) and layout is not None:
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

    @override
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
        if step % options.every == 0 and self.exchanges_buffers and options.buffers == "average":
            self._average_buffers()

    def _average_of(self, parts: Sequence[Part]) -> Average:
        dtype = self._replicas[0].get_parameter(parts[0].name).dtype
        pieces = pieces_of(parts, self._replicas[0])
        return self._options.over.average(self._options.codec, len(self._replicas), dtype, pieces)

    def _mean(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        over = self._options.over
        return over.average(IDENTITY, len(values), values[0].dtype, [])(over.addends(values))

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
        """Nesterov's step, as Sutskever et al. write it and torch.optim.SGD takes it: over a collective of all that
        travels together, at servers of each parameter. torch rounds the last elements of a 16-bit tensor otherwise.
        """
        rate, momentum = self._options.outer_lr, self._options.outer_momentum
        assert rate is not None, "checked by the caller"
        at_servers = isinstance(self._options.over, AtServers)
        sizes = [part.numel for part in self._groups[fragment][group]] if at_servers else [len(gradient)]
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
        for group in self._buffer_groups():
            if group[0][0].is_floating_point():
                average = self._mean([_flat(buffers) for buffers in group])
                for buffers in group:
                    for buffer, value in zip(buffers, average.split([b.numel() for b in buffers]), strict=True):
                        buffer.copy_(value.view(buffer.shape))
            else:
                _copy_first(group)

    def _buffer_groups(self) -> Iterator[list[list[torch.Tensor]]]:
        """Of each replica the buffers of one dtype."""
        for dtype in dict.fromkeys(buffer.dtype for buffer in self._replicas[0].buffers()):
            yield [[b for b in replica.buffers() if b.dtype == dtype] for replica in self._replicas]


def _of_each(
    one: torch.Tensor,
    sizes: Sequence[int],
    other: torch.Tensor,
    make: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """What ``make`` makes of pairs of pieces that are tensors by themselves."""
    pairs = zip(one.split(list(sizes)), other.split(list(sizes)), strict=True)
    return torch.cat([make(a.clone(), b.clone()) for a, b in pairs])


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _copy_first(group: Sequence[Sequence[torch.Tensor]]) -> None:
    for buffers in group[1:]:
        for buffer, source in zip(buffers, group[0], strict=True):
            buffer.copy_(source)
