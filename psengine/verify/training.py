"""On one rank: two trainings of a target take their steps in turn and are compared after each step.

reference   build ─ wrap ─┐         ┌ step 0 ─┐         ┌ step 1 ─┐
candidate   build ─ wrap ─┤ step 0 ─┘         │ step 1 ─┘         │
compare                   └ state             └ state             └ ...
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_map

from psengine.errors import ConfigurationError, PSEngineError
from psengine.strategies.base import Strategy
from psengine.strategies.registry import resolve_strategy
from psengine.verify.differences import KINDS, Difference, Tolerance, find_difference, is_finite
from psengine.verify.ranks import Place
from psengine.verify.target import (
    NativeDistributedDataParallel,
    Target,
    TargetError,
    check_target,
    load_function,
    type_of,
)
from psengine.wrapper.ddp import DistributedDataParallel
from psengine.wrapper.optimizer import DistributedOptimizer

NATIVE = "native"
START = -1


@dataclass
class Findings:
    """What differed on a rank.

    Attributes:
        first: the earliest difference, over steps, then loss, buffers, gradients, parameters.
        first_beyond: the earliest beyond the tolerance.
        history: for the start (step -1) and each step: by kind the largest absolute difference, both losses, and
            ``is_blind`` where neither training is finite.
        counts: how many tensors of each kind were compared after each step.
    """

    first: Difference | None = None
    first_beyond: Difference | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, found: Difference) -> None:
        """Note a difference; those of a rank come in their order."""
        self.first = self.first or found
        if not found.within:
            self.first_beyond = self.first_beyond or found


def train_side_by_side(
    place: Place, name: str, strategies: Sequence[tuple[str, str]], steps: int, seed: int, tolerance: Tolerance
) -> Findings:
    """Train the target ``name`` under two strategies, and return what differed on this rank.

    Args:
        place: of this rank.
        name: see ``target.load_function``.
        strategies: the candidate and the reference, each as the report names it, and with the servers and the job to
            use.
        steps: of each training.
        seed: of the model; ranks draw dropout and the like from it and their rank.
        tolerance: which differences are within it.

    Raises:
        ConfigurationError: the target is not what a target has to be, or a strategy refused it.
        Exception: whatever the user's code or a training raised.
    """
    place.note(f"the import of {name}")
    function = load_function(name)
    trainings: list[Training] = []
    for which, specification in strategies:
        place.note(f"the start of {name} under {which!r}")
        seed_all(seed)
        target = check_target(function(), name)
        if any(target.model is training.target.model for training in trainings):
            raise TargetError(
                f"target {name!r} makes a new model at each call (expected two models, got the same object twice)."
                " Fix: build the model inside the function."
            )
        try:
            trainings.append(Training(specification, target, name, seed, place))
        except TargetError:
            raise
        except PSEngineError as error:
            raise ConfigurationError(f"strategy {which!r} refuses {name}: {error}") from error
    findings = Findings()
    candidate, reference = trainings
    _compare(findings, START, candidate, reference, place.rank, tolerance)
    for step in range(steps):
        for (which, _), training in zip(strategies, trainings, strict=True):
            place.note(f"step {step} of {name} under {which!r}")
            training.step(step)
        _compare(findings, step, candidate, reference, place.rank, tolerance)
    place.note(f"the end of {name}")
    # After an error the process ends without this.
    for training in trainings:
        training.close()
    return findings


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
    if step != START:
        entry["candidate_loss"], entry["reference_loss"] = float(candidate.loss), float(reference.loss)
        entry["is_blind"] = candidate.is_blind and reference.is_blind
    findings.history.append(entry)


class Training:
    """A target's training under one strategy.

    The generators are seeded before each step, so that trainings that take their steps in turn draw the same numbers.

    Args:
        specification: a strategy, or "native" for native DDP.
        target: made for this training; its model is moved to the place's device and trained in place.
        name: the target's name, for messages.
        seed: the steps' generators are seeded by it, the step and the rank.
        place: of this rank.
    """

    def __init__(self, specification: str, target: Target, name: str, seed: int, place: Place) -> None:
        self.loss = torch.zeros(())
        self.target = target
        self._rule = f"target {name!r}"
        self._place, self._seed = place, seed
        target.model.to(place.device)
        self._strategy: Strategy | None = None
        if specification == NATIVE:
            self._wrapped: Any = NativeDistributedDataParallel(target.model, **target.ddp_options)
        else:
            self._strategy = resolve_strategy(specification)
            self._wrapped = DistributedDataParallel(target.model, strategy=self._strategy, **target.ddp_options)
        self.carries_buffers = self._strategy is not None and self._strategy.capabilities.carries_buffers
        self._optimizer: Any = target.optimizer_fn(list(self._wrapped.parameters()))
        if not isinstance(self._optimizer, torch.optim.Optimizer):
            raise TargetError(f"{self._rule}: optimizer_fn returns an optimizer (got {type_of(self._optimizer)})")
        closure = inspect.signature(self._optimizer.step).parameters.get("closure")
        self._needs_closure = closure is not None and closure.default is inspect.Parameter.empty
        if self._strategy is not None:
            self._optimizer = DistributedOptimizer(self._optimizer, self._wrapped)
        self._was_called = False
        self._wrapped.register_forward_pre_hook(self._note_call)

    def _note_call(self, _wrapped: torch.nn.Module, _inputs: Any) -> None:
        # A forward without a graph exchanges nothing.
        self._was_called = self._was_called or torch.is_grad_enabled()

    def step(self, index: int) -> None:
        """Zero the gradients, forward, backward, optimizer step; ``loss`` is the step's."""
        place = self._place
        # Ranks draw different numbers, as in a script that adds its rank to its seed.
        seed_all(self._seed + 1 + place.rank + place.world_size * index)
        batch = self.target.batch_fn(index, place.rank, place.world_size)
        if place.device.type != "cpu":
            batch = tree_map(lambda leaf: leaf.to(place.device) if isinstance(leaf, torch.Tensor) else leaf, batch)
        if self._needs_closure:
            # The optimizer evaluates the loss several times (LBFGS); the gradients left are the last ones.
            self.loss = self._optimizer.step(lambda: self._forward_backward(batch)).detach()
        else:
            self.loss = self._forward_backward(batch).detach()
            self._optimizer.step()

    def _forward_backward(self, batch: Any) -> torch.Tensor:
        self._optimizer.zero_grad()
        self._was_called = False
        loss = self.target.loss_fn(self._wrapped, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type_of(loss)
            raise TargetError(
                f"{self._rule}: loss_fn returns one number, a tensor that requires grad (got {got}). Fix: return a mean"
                " that is not detached, and no .item()."
            )
        if not self._was_called:
            raise TargetError(
                f"{self._rule}: loss_fn computes the loss with the model it is given, which exchanges the gradients"
                " (expected a call of model(...) with gradients enabled in each step, got none). Fix: call the argument"
                " itself, not the plain module, model.module or model.forward."
            )
        loss.backward()
        return loss

    def tensors(self, kind: str) -> Mapping[str, torch.Tensor | None]:
        """The tensors of a kind (see ``differences.KINDS``) by name, as they are now."""
        module = self.target.model
        if kind == "loss":
            return {"": self.loss}
        if kind == "buffer":
            return dict(module.named_buffers())
        if kind == "gradient":
            return {name: parameter.grad for name, parameter in module.named_parameters()}
        return {name: parameter.detach() for name, parameter in module.named_parameters()}

    @property
    def is_blind(self) -> bool:
        """Whether the last step was not finite: its loss, or every gradient, has NaN or infinity.

        NaN equals NaN, so a comparison with such a training shows nothing. One gradient with NaN does not make the
        comparison of the others worthless.
        """
        gradients = [gradient for gradient in self.tensors("gradient").values() if gradient is not None]
        return not is_finite(self.loss) or (bool(gradients) and not any(map(is_finite, gradients)))

    def close(self) -> None:
        """Leave servers."""
        if self._strategy is not None:
            self._strategy.close()


def seed_all(seed: int) -> None:
    """Seed the generators of torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
