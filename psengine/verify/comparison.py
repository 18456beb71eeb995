"""Train a target under two strategies from the same seed, in real processes, and find the first difference.

On each rank two trainings of the target take their steps in turn and are compared after each step::

    reference   build ─ wrap ─┐         ┌ step 0 ─┐         ┌ step 1 ─┐
    candidate   build ─ wrap ─┤ step 0 ─┘         │ step 1 ─┘         │
    compare                   └ state             └ state             └ ...
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import random
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch
from torch.nn.parallel import distributed as native
from torch.utils._pytree import tree_map

from psengine.errors import ConfigurationError, PSEngineError
from psengine.parameter_server.client.embedded import EmbeddedServer
from psengine.specification import Specification
from psengine.strategies.base import Strategy
from psengine.strategies.registry import resolve_strategy
from psengine.verify.differences import KINDS, Difference, Tolerance, find_difference, is_finite
from psengine.verify.ranks import MAX_RANKS, Place, RankFailedError, run_ranks
from psengine.wrapper.ddp import DistributedDataParallel
from psengine.wrapper.optimizer import DistributedOptimizer

EQUAL, WITHIN, DIFFERENT, NOT_FINITE = "bitwise equal", "within tolerance", "different", "not finite"
_CAUSES = (
    "likely causes: state at module level, which the trainings share (make it inside the target function); time,"
    " os.urandom or an unseeded generator; kernels that add in changing order, on CUDA above all"
    " (torch.use_deterministic_algorithms(True) finds them)"
)
FORMS = "module:function or path/to/file.py:function"
PARTS = "(model, batch_fn, loss_fn, optimizer_fn) or (model, batch_fn, loss_fn, optimizer_fn, ddp_options)"
# Captured at import: a program may put psengine's class in the native one's place.
NativeDistributedDataParallel: Any = native.DistributedDataParallel
NATIVE = "native"
START = -1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How ``compare`` trains, and which differences are within tolerance.

    Attributes:
        steps: how many each training takes.
        world_size: number of ranks, processes on this machine.
        strategy: the candidate: "native" for native DDP, or a strategy: "sync", "async:staleness_scaling=inverse", ...
            Those over servers get a server of their own, unless they name one.
        against: the same, for the reference.
        seed: of the model; ranks draw dropout and the like from it and their rank.
        rtol: two numbers may differ by atol + rtol * the largest magnitude in the reference's tensor. Default:
            torch.testing's tolerances for the dtype.
        atol: see rtol. If only one of the two is given, the other is 0.
        device: "cpu", or "cuda".
        timeout_s: deadline of the whole comparison.

    Raises:
        ConfigurationError: a value is out of its range, a strategy is unknown, or there is no such device here.
    """

    steps: int = 10
    world_size: int = 2
    strategy: str = "sync"
    against: str = NATIVE
    seed: int = 0
    rtol: float | None = None
    atol: float | None = None
    device: str = "cpu"
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for what, number, least, most in (
            ("steps", self.steps, 1, 10**6),
            ("world_size", self.world_size, 1, MAX_RANKS),
            ("seed", self.seed, 0, 2**31),
            ("rtol", self.rtol or 0, 0, 1e9),
            ("atol", self.atol or 0, 0, 1e9),
            ("timeout_s", self.timeout_s, 1e-3, 1e9),
        ):
            if not isinstance(number, type(most) | int) or not least <= number <= most:
                raise ConfigurationError(f"{what} is out of range (expected {least:g} to {most:g}, got {number!r})")
        if self.device not in ("cpu", "cuda"):
            raise ConfigurationError(f"unknown device (expected 'cpu' or 'cuda', got {self.device!r})")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigurationError("device 'cuda' needs a GPU that this torch can use (got none). Fix: --device cpu")
        for strategy in (self.strategy, self.against):
            if not isinstance(strategy, str):
                raise ConfigurationError(f"a strategy is a name here (expected such as {NATIVE!r}, got {strategy!r})")
            is_over_servers(strategy)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How a target trains under two strategies.

    Attributes:
        target: what was trained.
        settings: how; ``settings.strategy`` is the candidate, ``settings.against`` the reference.
        verdict: "bitwise equal", "within tolerance", "different"; "not finite", where both are NaN from the first
            step on, so that nothing was compared.
        first: the earliest difference, over steps, then loss, buffers, gradients, parameters; None where there is none.
        first_beyond: the earliest that is beyond the tolerance.
        history: for each step, and -1 for the start: largest absolute difference of each kind over all ranks, and both
            losses (the mean over ranks).
        counts: how many tensors of each kind were compared after each step.
        is_reproducible: where the verdict is "different": whether the reference gave the same numbers again, trained
            twice in processes of its own; None where that was not tried, or failed.
        notes: what a reader should know, a sentence each.
    """

    target: str
    settings: Settings
    verdict: str
    first: Difference | None
    first_beyond: Difference | None
    history: tuple[dict[str, Any], ...]
    counts: dict[str, int]
    is_reproducible: bool | None = None
    notes: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether the verdict is "bitwise equal" or "within tolerance"."""
        return self.verdict in (EQUAL, WITHIN)

    def to_json(self) -> dict[str, Any]:
        """As dicts and lists for ``json.dumps``; what is not finite becomes "Infinity", "-Infinity" or "NaN"."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)), parse_constant=str)
        return found


def compare(
    target: str, settings: Settings | None = None, *, on_note: Callable[[str], None] = lambda text: None
) -> Comparison:
    """Train ``target`` under ``settings.strategy`` and ``settings.against`` side by side; report what differs.

    Args:
        target: "module:function" or "path/to/file.py:function". The function takes no arguments and returns ``(model,
            batch_fn, loss_fn, optimizer_fn)``, and as a fifth part keyword arguments for both wrappers if any; see
            ``Target``. It is called once for each training, on each rank.
        settings: default: 10 steps of "sync" against native DDP on two ranks.
        on_note: told now and then what rank 0 is doing.

    Raises:
        ConfigurationError: the target cannot be found or is none, or a strategy refuses it.
        RankFailedError: the target's code raised (its traceback is in ``rank_traceback``), a rank died, or the
            deadline passed.
    """
    check_name(target)
    settings = settings or Settings()
    deadline_s = time.monotonic() + settings.timeout_s
    needs_server = any(
        is_over_servers(name) and "servers" not in Specification.parse("strategy", name).options
        for name in (settings.strategy, settings.against)
    )
    with EmbeddedServer.start() if needs_server else nullcontext() as server:
        found = merge(_train(target, settings, server, on_note), target, settings)
        if found.verdict != DIFFERENT:
            return found
        # The control, in fresh processes, so that the target's state at module level is as it was at first.
        left_s = max(0.1, deadline_s - time.monotonic())
        control = replace(settings, strategy=settings.against, timeout_s=left_s)
        try:
            reports = _train(target, control, server, lambda text: on_note(f"control: {text}"))
        except RankFailedError as error:
            note = f"no control: {settings.against} against itself could not be tried: {error}"
            return replace(found, notes=(note, *found.notes))
    differs = merge(reports, target, control).first
    if differs is None:
        notes = [
            f"control: {settings.against} in both places, in fresh processes, is bitwise equal: the target repeats"
            f" itself, and the difference comes with {settings.strategy}"
        ]
    else:
        differing = f"{settings.against} differs from itself, first {differs.where}"
        notes = [f"the target itself is not reproducible: {differing}", _CAUSES]
    return replace(found, is_reproducible=differs is None, notes=(*notes, *found.notes))


def _train(
    target: str, settings: Settings, server: EmbeddedServer | None, on_note: Callable[[str], None]
) -> list[Findings]:
    """What each rank found. Strategies over servers use ``server``, or those that they name; each has its own job."""
    job = f"verify-{uuid.uuid4().hex}"
    strategies = []
    for number, name in enumerate((settings.strategy, settings.against)):
        specification = name
        if is_over_servers(name):
            own = {"job": f"{job}.{number}"} | ({} if server is None else {"servers": server.addresses[0]})
            specification = Specification.parse("strategy", name).with_options(**own)
        strategies.append((name, specification))
    return run_ranks(
        train_side_by_side,
        target,
        strategies,
        settings.steps,
        settings.seed,
        Tolerance(relative=settings.rtol, absolute=settings.atol),
        world_size=settings.world_size,
        timeout_s=settings.timeout_s,
        device=settings.device,
        on_note=on_note,
    )


def merge(findings: Sequence[Findings], target: str, settings: Settings) -> Comparison:
    """What the ranks found, in rank order, as one."""
    firsts = [one.first for one in findings if one.first is not None]
    beyond = [one.first_beyond for one in findings if one.first_beyond is not None]
    steps = list(zip(*(one.history for one in findings), strict=True))
    # One blind rank makes the others blind, through the averaged gradients.
    seen = [entries[0]["step"] for entries in steps if not any(entry.get("is_blind", False) for entry in entries)]
    blind_from = max(seen, default=-1) + 1
    verdict = DIFFERENT if beyond else WITHIN if firsts else EQUAL
    notes = [f"by design: {text} (docs/ddp.md)" for text in findings[0].departures if verdict == DIFFERENT]
    if steps and blind_from <= steps[-1][0]["step"]:
        verdict = NOT_FINITE if blind_from == 0 and not beyond else verdict
        notes.append(
            f"not finite from step {blind_from} on: the loss, or every gradient, is NaN or infinite under both. NaN"
            " equals NaN, so steps from there on compare nothing. A bad batch, or too large a learning rate?"
        )
    return Comparison(
        target=target,
        settings=settings,
        verdict=verdict,
        first=min(firsts, key=lambda difference: difference.order, default=None),
        first_beyond=min(beyond, key=lambda difference: difference.order, default=None),
        history=tuple(map(_merge_step, steps)),
        counts=findings[0].counts,
        notes=tuple(notes),
    )


def _merge_step(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The ranks' entries of a step as one: the largest differences, the mean of the losses."""
    merged: dict[str, Any] = {"step": entries[0]["step"]}
    for key in (*KINDS, "candidate_loss", "reference_loss"):
        values = [entry[key] for entry in entries if key in entry]
        if values:
            merged[key] = sum(values) / len(values) if key.endswith("_loss") else max(values)
    return merged


def is_over_servers(strategy: str) -> bool:
    """Whether ranks that train under ``strategy`` meet at servers."""
    try:
        return strategy != NATIVE and not resolve_strategy(strategy).capabilities.needs_process_group
    except ConfigurationError as error:
        raise ConfigurationError(f"{error} ({NATIVE!r} is native DDP)") from error


class TargetError(ConfigurationError):
    """The target cannot be found, or is not what a target has to be."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One training, made anew by each call of the target function.

    Attributes:
        model: the module to wrap.
        batch_fn: ``batch_fn(step, rank, world_size)`` returns this rank's batch of a step, counted from 0.
        loss_fn: ``loss_fn(wrapped_model, batch)`` returns a scalar tensor.
        optimizer_fn: ``optimizer_fn(parameters)`` returns a ``torch.optim.Optimizer`` over a list of parameters.
        ddp_options: keyword arguments for both wrappers.
    """

    model: torch.nn.Module
    batch_fn: Callable[[int, int, int], Any]
    loss_fn: Callable[[torch.nn.Module, Any], torch.Tensor]
    optimizer_fn: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
    ddp_options: Mapping[str, Any]


def check_name(name: str) -> tuple[str, str]:
    """Return the (module or file, function) that ``name`` names, without running the user's code.

    Raises:
        TargetError: ``name`` has another form than "place:function", or its file does not exist.
    """
    place, _, function = name.rpartition(":")
    if not place or not function.isidentifier():
        raise TargetError(f"a target names a function (expected {FORMS}, got {name!r})")
    if _is_path(place) and not Path(place).is_file():
        raise TargetError(f"target {name!r}: no such file (expected {FORMS}, got the path {place!r})")
    return place, function


def load_function(name: str) -> Callable[[], Any]:
    """Import the module that ``name`` names and return the function. Errors of the user's module are not caught.

    Raises:
        TargetError: no such file, module or function, or the function needs arguments.
    """
    place, attribute = check_name(name)
    path = Path(place).resolve() if _is_path(place) else None
    # As when Python runs the file: what lies beside it can be imported.
    folder = str(path.parent if path else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = _load_file(path) if path else _load_module(place, name)
    except SystemExit as error:
        raise TargetError(
            f"target {name!r}: importing {place} ended the process (exit code {error.code!r}). Fix: parse_args(), and"
            ' the training, belong under if __name__ == "__main__":'
        ) from error
    found = getattr(module, attribute, None)
    if found is None:
        functions = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise TargetError(
            f"target {name!r}: {place} has no function {attribute!r} (expected one of {', '.join(functions) or 'none'})"
        )
    _check_function(found, f"target {name!r}", ())
    return found  # type: ignore[no-any-return]


def check_target(returned: Any, name: str) -> Target:
    """Make a ``Target`` of what the target function returned.

    Raises:
        TargetError: a part is missing or of the wrong type; the message names the part.
    """
    what = f"target {name!r} returns {PARTS}"
    if not isinstance(returned, tuple | list) or len(returned) not in (4, 5):
        got = f"{len(returned)} parts" if isinstance(returned, tuple | list) else type(returned).__name__
        raise TargetError(
            f"{what} (expected 4 or 5 parts, got {got}). Fix: name a function that returns these, not one that trains."
        )
    model, batch_fn, loss_fn, optimizer_fn = returned[:4]
    options = returned[4] if len(returned) == 5 else {}
    if not isinstance(model, torch.nn.Module) or isinstance(model, NativeDistributedDataParallel):
        raise TargetError(f"{what}: model is the plain module, which the comparison wraps (got {type_of(model)})")
    _check_function(loss_fn, f"{what}: loss_fn", ("model", "batch"))
    _check_function(optimizer_fn, f"{what}: optimizer_fn", ("parameters",))
    names = ("step", "rank", "world_size")
    takes_two = callable(batch_fn) and _accepts(batch_fn, names[:2]) and not _accepts(batch_fn, names)
    if not takes_two:
        _check_function(batch_fn, f"{what}: batch_fn", names)
    if not isinstance(options, Mapping):
        raise TargetError(f"{what}: ddp_options is a dict of arguments of DistributedDataParallel (got {options!r})")
    return Target(
        model=model,
        batch_fn=(lambda step, rank, world_size: batch_fn(step, rank)) if takes_two else batch_fn,
        loss_fn=loss_fn,
        optimizer_fn=optimizer_fn,
        ddp_options=dict(options),
    )


def type_of(value: Any) -> str:
    """Such as "list" or "the class Linear"."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _is_path(place: str) -> bool:
    return place.endswith(".py") or "/" in place


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} is not Python source (expected a file whose name ends in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickling look for it there
    spec.loader.exec_module(module)
    return module


def _load_module(module_name: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A missing import inside the user's module keeps its traceback.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise TargetError(
            f"target {name!r}: there is no module {error.name!r} (expected {FORMS}; modules are looked for in"
            f" {Path.cwd()} and among installed packages)"
        ) from error


def _check_function(function: Any, what: str, arguments: tuple[str, ...]) -> None:
    """Raise unless ``function`` can be called with ``arguments``."""
    if not callable(function) or not _accepts(function, arguments):
        got = f"a function of {inspect.signature(function)}" if callable(function) else type_of(function)
        raise TargetError(f"{what} is called with ({', '.join(arguments)}) (expected such a function, got {got})")


def _accepts(function: Callable[..., Any], arguments: tuple[str, ...]) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:
        return True  # of a built-in, which tells nothing about its arguments
    return True


@dataclass
class Findings:
    """What differed on a rank.

    Attributes:
        first: the earliest difference, over steps, then loss, buffers, gradients, parameters.
        first_beyond: the earliest beyond the tolerance.
        history: for the start (step -1) and each step: by kind the largest absolute difference, both losses, and
            ``is_blind`` where neither training is finite.
        counts: how many tensors of each kind were compared after each step.
        departures: where psengine differs from native DDP on purpose.
    """

    first: Difference | None = None
    first_beyond: Difference | None = None
    departures: list[str] = field(default_factory=list)
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
        name: see ``load_function``.
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
    if NATIVE in (which for which, _ in strategies):
        findings.departures = candidate.departures() + reference.departures()
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
        self._frozen = [parameter for parameter in target.model.parameters() if not parameter.requires_grad]
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

    def departures(self) -> list[str]:
        """What of this training differs from native DDP's on purpose."""
        found = []
        if self._strategy is not None and isinstance(self._optimizer, torch.optim.LBFGS):
            found.append("LBFGS searches along the mean loss of all ranks, under native DDP along each rank's own")
        if self._strategy is not None and any(parameter.requires_grad for parameter in self._frozen):
            found.append("layers that are thawed after wrapping are exchanged, under native DDP each rank's own")
        return found

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
