"""What "local" and "diloco" compute, and the same over servers, for one process that holds all replicas.

An oracle: it shares the cut of a model into fragments with the strategies, and nothing else. Papers: Lin et al. 2018
(arXiv 1808.07217), Douillard et al. 2023 (arXiv 2311.08105), Douillard et al. 2025 (arXiv 2501.18512).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from psengine.codecs.base import Codec
from psengine.codecs.registry import resolve_codec
from psengine.collectives.ring_order import add_in_ring_order
from psengine.errors import ConfigurationError
from psengine.strategies.local.fragments import cut
from psengine.verify.codec_rule import ARRIVES, CASTS, Average
from psengine.verify.rule import Layout, MakeRule, Replicas, Rule


@dataclass(frozen=True, kw_only=True)
class RuleOptions:
    """The strategies' options. ``outer_lr=None`` averages parameters.

    Attributes:
        mean: the average of equally shaped values, one of each replica.
        codec: of what travels, with a rule in ``codec_rule``; None: values travel as they are.
        buffers: what replicas do with their buffers at the end of a round: "average", "lowest" (all take rank 0's) or
            "own".
    """

    every: int
    warm_up: int = 0
    fragments: int = 1
    overlap: int = 0
    keep: float = 0.0
    outer_lr: float | None = None
    outer_momentum: float = 0.0
    mean: Callable[[Sequence[torch.Tensor]], torch.Tensor] = lambda values: mean_over_collective(values)
    codec: Codec | None = None
    buffers: str = "average"


def of_collective(strategy: Any, world_size: int) -> MakeRule:
    """The rule of "local" and "diloco".

    Raises:
        ConfigurationError: the codec has no rule.
    """
    given = strategy.__getstate__()  # the arguments that make an equal strategy
    codec = resolve_codec(given.pop("compress"))
    if codec.is_lossless:
        return _maker(RuleOptions(**given))
    if codec.name not in (*ARRIVES, *CASTS):
        raise ConfigurationError(
            f"verify has no rule of codec {codec.name!r} (expected one of {sorted([*ARRIVES, *CASTS])}). Fix: --against"
            " native, and compare losses."
        )
    differences_travel = {"outer_lr": 1.0, "outer_momentum": 0.0}
    return _maker(RuleOptions(codec=codec, **differences_travel | given))


def of_servers(strategy: Any, world_size: int) -> MakeRule:
    """The rule of "local-server" and "diloco-server".

    Raises:
        ConfigurationError: a merge does not wait for all workers, so its result follows from when they arrive.
    """
    given = strategy.__getstate__()
    codec = resolve_codec(given["compress"])
    if not codec.is_lossless:
        raise ConfigurationError(
            f"the rule of {strategy.name!r} has no codecs (expected no compress, got {codec}). Fix: leave out compress,"
            " or --against native, and compare losses."
        )
    if strategy.name == "local-server":
        return _maker(RuleOptions(every=given["every"], mean=mean_at_server, buffers="lowest"))
    if given["quorum"] < world_size:
        raise ConfigurationError(
            "what a merge of a part of the workers computes depends on when they arrive (expected a quorum of all"
            f" {world_size} ranks, got quorum={given['quorum']}). Fix: --strategy diloco-server:quorum={world_size}"
        )
    outer = {name: given[name] for name in ("outer_lr", "outer_momentum")}
    return _maker(RuleOptions(every=given["every"], mean=mean_at_server, buffers="own", **outer))


def _maker(options: RuleOptions) -> MakeRule:
    def make(replicas: Replicas, layout: Layout) -> Rule:
        return LocalRule(replicas, options)

    return make


class LocalRule(Rule):
    """Applies the rule to equal replicas.

    Args:
        replicas: the modules; mutated.
        options: of the rule.
    """

    def __init__(self, replicas: Replicas, options: RuleOptions) -> None:
        self._replicas = replicas
        self._options = options
        self.averages_gradients = options.warm_up > 0
        self._step = 0
        # By fragment: of each replica the parameters of one dtype, which travel as one array.
        self._groups: list[list[list[list[torch.nn.Parameter]]]] = []
        trained = {name: one for name, one in replicas[0].named_parameters() if one.requires_grad}
        for part in cut(trained, options.fragments):
            dtypes = dict.fromkeys(one.dtype for one in part.values())
            self._groups.append(
                [
                    [
                        [replica.get_parameter(name) for name, one in part.items() if one.dtype == dtype]
                        for replica in replicas
                    ]
                    for dtype in dtypes
                ]
            )
        # By fragment and group.
        self._agreed: list[list[torch.Tensor]] = []
        self._codecs = [[self._average_of() for _ in groups] for groups in self._groups]
        self._momenta: list[list[torch.Tensor | None]] = [[None] * len(groups) for groups in self._groups]
        # (step at which they are used, fragment, the averages of its groups)
        self._sent: list[tuple[int, int, list[torch.Tensor]]] = []
        if options.warm_up == 0:
            self._begin()

    def _begin(self) -> None:
        self._agreed = [[_flat(replicas[0]) for replicas in groups] for groups in self._groups]

    @override
    @torch.no_grad()
    def before_forward(self) -> None:
        """In the warm-up replicas have rank 0's buffers, as native DDP's."""
        if self._step < self._options.warm_up:
            self._copy_buffers()

    @override
    @torch.no_grad()
    def before_step(self) -> None:
        """In the warm-up gradients are averaged."""
        if self._step < self._options.warm_up:
            for parameters in zip(*(replica.parameters() for replica in self._replicas), strict=True):
                if any(p.grad is not None for p in parameters):
                    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in parameters]
                    average = self._options.mean(gradients)
                    if any(p.grad is not None and p.grad.is_sparse for p in parameters):
                        average = average.to_sparse(1)
                    for parameter in parameters:
                        parameter.grad = average.clone()

    @override
    @torch.no_grad()
    def after_step(self) -> None:
        options = self._options
        self._step += 1
        step = self._step - options.warm_up
        if step == 0:
            self._begin()
        if step <= 0:
            return
        for fragment, groups in enumerate(self._groups):
            if step % options.every == (fragment + 1) * options.every // options.fragments % options.every:
                averages = []
                for group, replicas in enumerate(groups):
                    values = [_flat(parameters) for parameters in replicas]
                    if options.outer_lr is not None:
                        values = [self._agreed[fragment][group] - value for value in values]
                    averages.append(self._codecs[fragment][group](values))
                self._sent.append((step + options.overlap, fragment, averages))
        for entry in [entry for entry in self._sent if entry[0] == step]:
            self._sent = [one for one in self._sent if one is not entry]
            for group, average in enumerate(entry[2]):
                self._use(entry[1], group, average)
        if step % options.every == 0:
            if options.buffers == "average":
                self._average_buffers()
            elif options.buffers == "lowest":
                self._copy_buffers()

    def _average_of(self) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
        """The average of values that travel, with residuals of their own."""
        codec = self._options.codec
        if codec is None:
            return self._options.mean
        if codec.name in CASTS:
            return functools.partial(mean_of_casts, dtype=CASTS[codec.name])
        average = Average(codec.name, len(self._replicas), **codec.options)
        return lambda values: average([value * (1.0 / len(values)) for value in values]).to(values[0].dtype)

    def _use(self, fragment: int, group: int, average: torch.Tensor) -> None:
        options = self._options
        if options.outer_lr is None:
            agreed, keep = average, 0.0
        else:
            agreed, keep = self._outer_step(fragment, group, average), options.keep if options.overlap else 0.0
        self._agreed[fragment][group] = agreed
        for parameters in self._groups[fragment][group]:
            values = agreed.split([parameter.numel() for parameter in parameters])
            for parameter, value in zip(parameters, values, strict=True):
                shaped = value.view(parameter.shape)
                parameter.copy_(torch.lerp(parameter, shaped, 1.0 - keep) if keep else shaped)

    def _outer_step(self, fragment: int, group: int, gradient: torch.Tensor) -> torch.Tensor:
        """Nesterov's step, as Sutskever et al. write it and torch.optim.SGD takes it."""
        rate, momentum = self._options.outer_lr, self._options.outer_momentum
        assert rate is not None, "checked by the caller"
        if momentum:
            last = self._momenta[fragment][group]
            velocity = gradient.clone() if last is None else last.mul(momentum).add(gradient)
            self._momenta[fragment][group] = velocity
            gradient = gradient.add(velocity, alpha=momentum)
        return self._agreed[fragment][group].add(gradient, alpha=-rate)

    def _average_buffers(self) -> None:
        for group in self._buffer_groups():
            if group[0][0].is_floating_point():
                average = self._options.mean([_flat(buffers) for buffers in group])
                for buffers in group:
                    for buffer, value in zip(buffers, average.split([b.numel() for b in buffers]), strict=True):
                        buffer.copy_(value.view(buffer.shape))
            else:
                _copy_first(group)

    def _copy_buffers(self) -> None:
        for group in self._buffer_groups():
            _copy_first(group)

    def _buffer_groups(self) -> Iterator[list[list[torch.Tensor]]]:
        """Of each replica the buffers of one dtype."""
        for dtype in dict.fromkeys(buffer.dtype for buffer in self._replicas[0].buffers()):
            yield [[b for b in replica.buffers() if b.dtype == dtype] for replica in self._replicas]


def mean_over_collective(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their shares are rounded, then added in the order of gloo's all-reduce; 1-D, or with two replicas any shape."""
    shares = [value * (1.0 / len(values)) for value in values]
    total = torch.empty_like(shares[0])
    add_in_ring_order(shares, total)
    return total


def mean_of_casts(values: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """``mean_over_collective`` of shares that are rounded to ``dtype``, where that is narrower."""
    if dtype.itemsize >= values[0].dtype.itemsize:
        return mean_over_collective(values)
    shares = [(value * (1.0 / len(values))).to(dtype) for value in values]
    total = torch.empty_like(shares[0])
    add_in_ring_order(shares, total)
    return total.to(values[0].dtype)


def mean_at_server(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Values are added in the order of ranks, in float32 at least, and their sum is divided."""
    dtype = torch.promote_types(values[0].dtype, torch.float32)
    total = values[0].to(dtype)
    for value in values[1:]:
        total = total + value
    return (total / len(values)).to(values[0].dtype)


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _copy_first(group: Sequence[Sequence[torch.Tensor]]) -> None:
    for buffers in group[1:]:
        for buffer, source in zip(buffers, group[0], strict=True):
            buffer.copy_(source)
