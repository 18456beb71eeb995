"""Rounds: each replica takes optimizer steps without communication; parts of the model are synchronised in turn.

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
from typing import Any

import torch
from typing_extensions import override

from psengine.errors import ConfigurationError
from psengine.strategies.base import StepStrategy
from psengine.strategies.exchange import Step
from psengine.strategies.local.options import RoundOptions
from psengine.strategies.local.outer_step import OuterStep
from psengine.strategies.local.scaled_step import ScaledStep
from psengine.tensors.share import Share


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
