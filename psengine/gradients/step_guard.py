"""Watches that optimizers step on exchanged gradients: replicas that step on their own drift apart, and nothing fails.

A trainer that calls ``model.module``, a last micro-batch inside ``no_sync``, an optimizer that steps in a parameter's
hook: native DDP says nothing in any of these cases. A gradient that is accumulated while no exchange is expected is
*stray* until an exchange takes it along::

    no_sync     backward ── stray ──┐
    exchange    backward ───────────┴─► averages       step: fine
    .module     backward ── stray ────────────────────► step: warned of
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from psengine.gradients.reducer import Reducer

logger = logging.getLogger(__name__)

_CAUSES = {
    "module": (
        "backward came from a forward that did not go through the wrapper",
        "call model(...), not model.module(...)",
    ),
    "no_sync": (
        "all backwards of this step were inside no_sync()",
        "leave no_sync() for the last micro-batch of each step, its forward included",
    ),
    "late": (
        "the exchange was on another micro-batch than the last of this step",
        "leave no_sync() for the last micro-batch, not for an earlier one",
    ),
    "hook": (
        "the optimizer stepped inside backward, before the exchange",
        "step after backward, not in a hook of a parameter",
    ),
}


class StepGuard:
    """What a reducer's gradients have gone through since the last step of an optimizer.

    Args:
        names: of the parameters whose gradients are exchanged.

    Attributes:
        stray: the index of a parameter whose gradient was accumulated outside of an exchange; None: there is none.
        accumulates: whether the last forward through the wrapper was inside ``no_sync``.
        is_early_step_allowed: whether optimizers may step inside backward, as a communication hook's do.
        optimizers: those that have stepped parameters of this replica.
        last_violation: the step that last used gradients that were not exchanged; None: none did.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.stray: int | None = None
        self.accumulates = self.is_early_step_allowed = False
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.last_violation: int | None = None
        self._names = names
        self._was_exchanged = False  # since the last step
        self._told: set[str] = set()
        self._handle: Any = None

    def listen(self, reducer: Reducer) -> None:
        """See every step of an optimizer in this process, distributed or not."""
        reference = weakref.ref(reducer)

        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (reducer := reference()) is not None:
                self._check(optimizer, reducer)

        self._handle = register_optimizer_step_pre_hook(before_step)

    def stop_listening(self) -> None:
        """The reducer is given up."""
        if self._handle is not None:
            self._handle.remove()

    def exchanged(self) -> None:
        """An exchange has taken all gradients along."""
        self.stray, self._was_exchanged = None, True

    def _check(self, optimizer: torch.optim.Optimizer, reducer: Reducer) -> None:
        """An optimizer is about to step: warn where it does so on gradients that were not exchanged."""
        is_early = reducer.awaits_exchange and not self.is_early_step_allowed
        if self.stray is None and not is_early and optimizer in self.optimizers:
            self._was_exchanged = False
            return
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        own = [index for index, parameter in enumerate(reducer.parameters) if id(parameter) in stepped]
        if not own:
            return
        self.optimizers.add(optimizer)
        with_gradient = [index for index in own if reducer.parameters[index].grad is not None]
        if not with_gradient or not reducer.exchanges_gradients or (self.stray is None and not is_early):
            self._was_exchanged = False
            return
        cause = "hook" if is_early else "no_sync" if self.accumulates else "module"
        if cause == "no_sync" and self._was_exchanged:
            cause = "late"
        name = self._names[self.stray if self.stray in with_gradient else with_gradient[0]]
        self.stray, self._was_exchanged, self.last_violation = None, False, reducer.completed_steps + 1
        why, fix = _CAUSES[cause]
        text = (
            f"rank {reducer.rank}: {type(optimizer).__name__} steps on gradients of this rank alone, so replicas drift"
            f" apart (expected averages of all ranks, got parameter {name!r} with a gradient that was not exchanged:"
            f" {why}, after {reducer.completed_steps} exchanges). Fix: {fix}."
        )
        if cause not in self._told:
            self._told.add(cause)
            logger.warning("%s Said once.", text)
