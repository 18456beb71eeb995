"""The training of a rule: each process holds all replicas, which take their steps one after the other.

::

    rank 0   replica 0 ─ replica 1 ─ ... ─ rule       this rank compares replica 0 with its candidate
    rank 1   replica 0 ─ replica 1 ─ ... ─ rule       and this one replica 1

Nothing travels between ranks after the start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from psengine.strategies.registry import resolve_strategy
from psengine.verify.parts import Part
from psengine.verify.ranks import Place, become_rank_0s
from psengine.verify.rule import Layout
from psengine.verify.rules import PREFIX, rule_of
from psengine.verify.target import RefusedError, Target
from psengine.verify.training import Exchange, Training


class RuleTraining:
    """Like ``Training``, under the rule that ``exchange`` names.

    Args:
        make_target: seeds the generators, and makes the target anew for each replica.
        layout: see ``rule.Layout``; None where nothing else is trained.
        exchange, name, seed, place: see ``Training``.

    Raises:
        ConfigurationError: see ``rules.rule_of``.
        RefusedError: the optimizer needs a closure, and the rule averages gradients.
    """

    def __init__(
        self,
        exchange: Exchange,
        make_target: Callable[[], Target],
        name: str,
        seed: int,
        place: Place,
        layout: Layout | None,
    ) -> None:
        strategy = exchange.name.removeprefix(PREFIX)
        self.carries_buffers = resolve_strategy(strategy).capabilities.carries_buffers
        self._replicas: list[Training] = []
        for rank in range(place.world_size):
            target = make_target()
            become_rank_0s([*target.model.parameters(), *target.model.buffers()])
            self._replicas.append(Training(None, target, name, seed, replace(place, rank=rank)))
        self._own: Training = self._replicas[place.rank]
        make = rule_of(strategy, place.world_size)
        assert make is not None, "native DDP is trained by Training"
        self._rule = make([replica.module for replica in self._replicas], layout or self.layout)
        options = target.ddp_options
        both = (options.get("forward_sync_buffers"), options.get("broadcast_buffers"))
        self._rule.exchanges_buffers = next((given for given in both if given is not None), True)
        if self._rule.averages_gradients and self._own.needs_closure:
            raise RefusedError(
                f"{exchange.name} averages gradients between backward and the optimizer's step (expected an optimizer"
                " whose step needs no closure). Fix: another optimizer, or --against native."
            )

    @property
    def loss(self) -> torch.Tensor:
        """That of the last step of this rank's replica."""
        return self._own.loss

    def step(self, index: int) -> None:
        """All replicas take a step; see the module's text."""
        self._rule.before_forward()
        for replica in self._replicas:
            replica.compute(index)
        self._rule.before_step()
        for replica in self._replicas:
            replica.update()
        self._rule.after_step()

    def tensors(self, kind: str) -> Mapping[str, torch.Tensor | None]:
        """Those of this rank's replica; see ``Training``."""
        return self._own.tensors(kind)

    def layout(self) -> Sequence[Sequence[Part]]:
        """Nobody's buckets: one for the parameters of each dtype."""
        return self._own.layout()

    def close(self) -> None:
        """Let go of the replicas."""
        for replica in self._replicas:
            replica.close()
