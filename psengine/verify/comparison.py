"""Train a target under two strategies from the same seed, in real processes, and find the first difference."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from psengine.errors import ConfigurationError
from psengine.parameter_server.client.embedded import EmbeddedServer
from psengine.specification import Specification
from psengine.strategies.registry import resolve_strategy
from psengine.verify.differences import KINDS, Difference, Tolerance
from psengine.verify.ranks import MAX_RANKS, RankFailedError, run_ranks
from psengine.verify.training import NATIVE, Findings, check_name, train_side_by_side

EQUAL, WITHIN, DIFFERENT, NOT_FINITE = "bitwise equal", "within tolerance", "different", "not finite"
_CAUSES = (
    "likely causes: state at module level, which the trainings share (make it inside the target function); time,"
    " os.urandom or an unseeded generator; kernels that add in changing order, on CUDA above all"
    " (torch.use_deterministic_algorithms(True) finds them)"
)


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
    notes = []
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
