"""On one rank: two trainings of a target take their steps in turn and are compared after each step.

reference   build ─ wrap ─┐ step 0 ─┐           step 1 ─┐
candidate   build ─ wrap ─┤         └ step 0 ─┐         └ step 1 ─┐
compare                   └ state             └ state             └ ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from psengine.errors import PSEngineError
from psengine.verify.differences import (
    KINDS,
    Difference,
    Tolerance,
    find_difference,
    finite_or_name,
    is_finite,
    square_distance,
)
from psengine.verify.place import Place
from psengine.verify.random_state import seed_all
from psengine.verify.target import Target, TargetError
from psengine.verify.training import Exchange, Training

START = -1


class RefusedError(PSEngineError):
    """A strategy does not take this model or optimizer; the message is its own."""


def train_side_by_side(
    make_target: Callable[[], Target],
    name: str,
    candidate: Exchange,
    reference: Exchange,
    place: Place,
    *,
    steps: int,
    seed: int,
    tolerance: Tolerance,
) -> dict[str, Any]:
    """Train both ways and return this rank's findings, in JSON types; ``verdict.merge`` puts the ranks' together.

    Raises:
        RefusedError: a strategy refused the model or the optimizer.
        TargetError: the target is not what a target has to be.
        Exception: whatever the user's code or a training raised.
    """
    trainings: list[Training] = []
    models: list[torch.nn.Module] = []
    try:
        for which, exchange in (("reference", reference), ("candidate", candidate)):
            place.note(f"the start of {name} under {exchange.name!r} (the {which})")
            seed_all(seed)
            target = make_target()
            if any(target.model is model for model in models):
                raise TargetError(
                    f"target {name!r} makes a new model at each call (expected two models, got the same object twice)."
                    " Fix: build the model inside the function."
                )
            models.append(target.model)
            trainings.append(_wrap(exchange, target, name, seed, place))
        findings = _Findings(place, tolerance)
        findings.compare(START, trainings[1], trainings[0])
        for step in range(steps):
            for training in trainings:
                place.note(f"step {step} of {name} under {training.exchange.name!r}")
                training.step(step)
            findings.compare(step, trainings[1], trainings[0])
        place.note(f"the end of {name}")
        return findings.to_json()
    finally:
        for training in trainings:
            training.close()


def _wrap(exchange: Exchange, target: Target, name: str, seed: int, place: Place) -> Training:
    try:
        return Training(
            exchange,
            target,
            name=name,
            seed=seed,
            rank=place.rank,
            world_size=place.world_size,
            device=place.device,
        )
    except TargetError:
        raise
    except PSEngineError as error:
        raise RefusedError(f"strategy {exchange.name!r} refuses {name}: {error}") from error


def _is_blind(training: Training) -> bool:
    """Whether ``training`` is not finite after this step: its loss, or every gradient, has NaN or infinity.

    NaN equals NaN, so a comparison with such a training shows nothing. One gradient with NaN does not make the
    comparison of the others worthless.
    """
    gradients = [gradient for gradient in training.tensors("gradient").values() if gradient is not None]
    return not is_finite(training.loss) or (bool(gradients) and not any(map(is_finite, gradients)))


def _distance(candidate: Training, reference: Training) -> float:
    """The norm of the difference of the weights, divided by that of the reference's."""
    theirs = reference.tensors("parameter")
    apart = norm = 0.0
    for name, ours in candidate.tensors("parameter").items():
        other = theirs.get(name)
        if ours is not None and other is not None:
            squares = square_distance(ours, other)
            apart, norm = apart + squares[0], norm + squares[1]
    return math.sqrt(apart / norm) if norm else math.sqrt(apart)


class _Findings:
    """What differed so far on this rank."""

    def __init__(self, place: Place, tolerance: Tolerance) -> None:
        self._place = place
        self._tolerance = tolerance
        self._first: Difference | None = None
        self._first_beyond: Difference | None = None
        self._largest_absolute: Difference | None = None
        self._largest_relative: Difference | None = None
        self._history: list[dict[str, Any]] = []
        self._counts: dict[str, int] = {}

    def compare(self, step: int, candidate: Training, reference: Training) -> None:
        """Compare everything that the trainings hold after ``step``."""
        entry: dict[str, Any] = {"step": step}
        for kind in KINDS if step != START else ("buffer", "parameter"):
            if kind == "buffer" and not self._sees_buffers(candidate, reference):
                continue
            ours, theirs = candidate.tensors(kind), reference.tensors(kind)
            entry[kind] = 0.0
            self._counts[kind] = len(theirs)
            for place, name in enumerate(dict.fromkeys([*theirs, *ours])):
                a, b = ours.get(name), theirs.get(name)
                found = find_difference(
                    a, b, self._tolerance, step=step, rank=self._place.rank, kind=kind, name=name, place=place
                )
                if found is not None:
                    entry[kind] = max(entry[kind], found.absolute)
                    self._note(found)
            entry[kind] = finite_or_name(entry[kind])
        entry["distance"] = finite_or_name(_distance(candidate, reference) if entry["parameter"] else 0.0)
        if step != START:
            entry["candidate_loss"] = finite_or_name(float(candidate.loss))
            entry["reference_loss"] = finite_or_name(float(reference.loss))
            entry["is_blind"] = _is_blind(candidate) and _is_blind(reference)
        self._history.append(entry)

    def _sees_buffers(self, candidate: Training, reference: Training) -> bool:
        # Native DDP broadcasts rank 0's buffers before the next forward, servers hand them out after backward: between
        # the two only rank 0 has them under both.
        return self._place.rank == 0 or candidate.carries_buffers == reference.carries_buffers

    def _note(self, found: Difference) -> None:
        if self._first is None or found.order < self._first.order:
            self._first = found
        if not found.within and (self._first_beyond is None or found.order < self._first_beyond.order):
            self._first_beyond = found
        if self._largest_absolute is None or found.absolute > self._largest_absolute.absolute:
            self._largest_absolute = found
        if self._largest_relative is None or found.relative > self._largest_relative.relative:
            self._largest_relative = found

    def to_json(self) -> dict[str, Any]:
        """As dicts and lists."""
        found: Mapping[str, Difference | None] = {
            "first": self._first,
            "first_beyond": self._first_beyond,
            "largest_absolute": self._largest_absolute,
            "largest_relative": self._largest_relative,
        }
        return {
            **{key: None if value is None else value.to_json() for key, value in found.items()},
            "history": self._history,
            "counts": self._counts,
        }
