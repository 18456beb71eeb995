"""What "local" and "diloco" compute, written down once more for one process that holds all replicas.

An oracle: it shares the cut of a model into fragments with the strategies, and nothing else. Papers: Lin et al. 2018
(arXiv 1808.07217), Douillard et al. 2023 (arXiv 2311.08105), Douillard et al. 2025 (arXiv 2501.18512).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from psengine.strategies.local.fragments import cut

Replicas = Sequence[torch.nn.Module]


@dataclass(frozen=True, kw_only=True)
class RuleOptions:
    """The strategies' options. ``outer_lr=None`` averages parameters."""

    every: int
    warm_up: int = 0
    fragments: int = 1
    overlap: int = 0
    keep: float = 0.0
    outer_lr: float | None = None
    outer_momentum: float = 0.0


class LocalRule:
    """Applies the rule to equal replicas: ``before_step`` and ``after_step`` around each of their steps.

    Args:
        replicas: the modules, of one dtype; mutated.
        options: of the rule.
    """

    def __init__(self, replicas: Replicas, options: RuleOptions) -> None:
        self._replicas = replicas
        self._options = options
        self._step = 0
        parts = cut(dict(replicas[0].named_parameters()), options.fragments)
        self._names = [list(part) for part in parts]
        self._agreed: list[torch.Tensor] = []
        self._momenta: list[torch.Tensor | None] = [None] * options.fragments
        # (step at which it is used, fragment, the average of the differences)
        self._sent: list[tuple[int, int, torch.Tensor]] = []
        if options.warm_up == 0:
            self._begin()

    def _begin(self) -> None:
        self._agreed = [self._flat(self._replicas[0], fragment) for fragment in range(self._options.fragments)]

    @torch.no_grad()
    def before_step(self) -> None:
        """All replicas have gradients; in the warm-up they are averaged."""
        if self._step < self._options.warm_up:
            for parameters in zip(*(replica.parameters() for replica in self._replicas), strict=True):
                gradients = [p.grad for p in parameters if p.grad is not None]
                if gradients:
                    average = _mean([g if g is not None else torch.zeros_like(p) for p in parameters for g in [p.grad]])
                    for parameter in parameters:
                        parameter.grad = average.clone()

    @torch.no_grad()
    def after_step(self) -> None:
        """All replicas have stepped."""
        options = self._options
        self._step += 1
        step = self._step - options.warm_up
        if step == 0:
            self._begin()
        if step <= 0:
            return
        for fragment in range(options.fragments):
            if step % options.every == (fragment + 1) * options.every // options.fragments % options.every:
                values = [self._flat(replica, fragment) for replica in self._replicas]
                if options.outer_lr is not None:
                    values = [self._agreed[fragment] - value for value in values]
                self._sent.append((step + options.overlap, fragment, _mean(values)))
        for due, fragment, average in [entry for entry in self._sent if entry[0] == step]:
            self._sent.remove((due, fragment, average))
            self._use(fragment, average)
        if step % options.every == 0:
            self._average_buffers()

    def _use(self, fragment: int, average: torch.Tensor) -> None:
        options = self._options
        if options.outer_lr is None:
            agreed, keep = average, 0.0
        else:
            agreed, keep = self._outer_step(fragment, average), options.keep if options.overlap else 0.0
        self._agreed[fragment] = agreed
        for replica in self._replicas:
            parameters = dict(replica.named_parameters())
            names = self._names[fragment]
            values = agreed.split([parameters[name].numel() for name in names])
            for name, value in zip(names, values, strict=True):
                parameter, shaped = parameters[name], value.view(parameters[name].shape)
                parameter.copy_(torch.lerp(parameter, shaped, 1.0 - keep) if keep else shaped)

    def _outer_step(self, fragment: int, gradient: torch.Tensor) -> torch.Tensor:
        """Nesterov's step, as Sutskever et al. write it and torch.optim.SGD takes it."""
        rate, momentum = self._options.outer_lr, self._options.outer_momentum
        assert rate is not None, "checked by the caller"
        if momentum:
            last = self._momenta[fragment]
            velocity = gradient.clone() if last is None else last.mul(momentum).add(gradient)
            self._momenta[fragment] = velocity
            gradient = gradient.add(velocity, alpha=momentum)
        return self._agreed[fragment].add(gradient, alpha=-rate)

    def _average_buffers(self) -> None:
        for buffers in zip(*(replica.buffers() for replica in self._replicas), strict=True):
            value = _mean(list(buffers)) if buffers[0].is_floating_point() else buffers[0].clone()
            for buffer in buffers:
                buffer.copy_(value)

    def _flat(self, replica: torch.nn.Module, fragment: int) -> torch.Tensor:
        parameters = dict(replica.named_parameters())
        pieces = [parameters[name].detach().reshape(-1) for name in self._names[fragment]]
        return torch.cat(pieces) if pieces else torch.empty(0)


def _mean(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their shares are rounded, then added in the order of ranks."""
    share = 1.0 / len(values)
    total = values[0] * share
    for value in values[1:]:
        total = total + value * share
    return total
