"""On one rank: two trainings of a target take their steps in turn and are compared after each step.

reference   build ─ wrap ─┐         ┌ step 0 ─┐         ┌ step 1 ─┐
candidate   build ─ wrap ─┤ step 0 ─┘         │ step 1 ─┘         │
compare                   └ state             └ state             └ ...
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from psengine.errors import PSEngineError
from psengine.verify.differences import KINDS, Difference, Tolerance, find_difference, is_finite, square_distance
from psengine.verify.ranks import Place
from psengine.verify.target import RefusedError, Target, TargetError
from psengine.verify.training import Exchange, Training, seed_all

START = -1


@dataclass
class Findings:
    """What differed on a rank.

    Attributes:
        first, first_beyond, largest_absolute, largest_relative: see ``Comparison``.
        history: an entry for the start and for each step; in an ``is_blind`` step neither training is finite.
        counts: how many tensors of each kind were compared after each step.
    """

    first: Difference | None = None
    first_beyond: Difference | None = None
    largest_absolute: Difference | None = None
    largest_relative: Difference | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, found: Difference) -> None:
        """Note a difference."""
        if self.first is None or found.order < self.first.order:
            self.first = found
        if not found.within and (self.first_beyond is None or found.order < self.first_beyond.order):
            self.first_beyond = found
        if self.largest_absolute is None or found.absolute > self.largest_absolute.absolute:
            self.largest_absolute = found
        if self.largest_relative is None or found.relative > self.largest_relative.relative:
            self.largest_relative = found


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
) -> Findings:
    """Train both ways and return what differed on this rank; ``verdict.merge`` puts the ranks' findings together.

    Raises:
        RefusedError: a strategy refused the model or the optimizer.
        TargetError: the target is not what a target has to be.
        Exception: whatever the user's code or a training raised.
    """
    trainings: list[Training] = []
    models: list[torch.nn.Module] = []

    def make_seeded() -> Target:
        seed_all(seed)
        target = make_target()
        if any(target.model is model for model in models):
            raise TargetError(
                f"target {name!r} makes a new model at each call (expected two models, got the same object twice)."
                " Fix: build the model inside the function."
            )
        models.append(target.model)
        return target

    try:
        for which, exchange in (("candidate", candidate), ("reference", reference)):
            place.note(f"the start of {name} under {exchange.name!r} (the {which})")
            try:
                trainings.append(Training(exchange, make_seeded(), name, seed, place))
            except (TargetError, RefusedError):
                raise
            except PSEngineError as error:
                raise RefusedError(f"strategy {exchange.name!r} refuses {name}: {error}") from error
        findings = Findings()
        ours, theirs = trainings
        _compare(findings, START, ours, theirs, place.rank, tolerance)
        for step in range(steps):
            for training, exchange in zip(trainings, (candidate, reference), strict=True):
                place.note(f"step {step} of {name} under {exchange.name!r}")
                training.step(step)
            _compare(findings, step, ours, theirs, place.rank, tolerance)
        place.note(f"the end of {name}")
        return findings
    finally:
        for training in trainings:
            training.close()


def _compare(
    findings: Findings, step: int, candidate: Training, reference: Training, rank: int, tolerance: Tolerance
) -> None:
    """Compare everything that the trainings hold after ``step``."""
    entry: dict[str, Any] = {"step": step}
    for kind in KINDS if step != START else ("buffer", "parameter"):
        # Native DDP broadcasts rank 0's buffers before the next forward, servers send them after backward. Between the
        # two, only rank 0 has them under both.
        if kind == "buffer" and rank != 0 and candidate.carries_buffers != reference.carries_buffers:
            continue
        ours, theirs = candidate.tensors(kind), reference.tensors(kind)
        entry[kind] = 0.0
        findings.counts[kind] = len(theirs)
        for place, name in enumerate(dict.fromkeys([*theirs, *ours])):
            found = find_difference(
                ours.get(name), theirs.get(name), tolerance, step=step, rank=rank, kind=kind, name=name, place=place
            )
            if found is not None:
                entry[kind] = max(entry[kind], found.absolute)
                findings.add(found)
    entry["distance"] = _distance(candidate, reference) if entry["parameter"] else 0.0
    if step != START:
        entry["candidate_loss"], entry["reference_loss"] = float(candidate.loss), float(reference.loss)
        entry["is_blind"] = _is_blind(candidate) and _is_blind(reference)
    findings.history.append(entry)


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
