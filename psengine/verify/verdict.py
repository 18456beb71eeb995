"""The result of a comparison: the ranks' findings merged, the verdict, and notes for the reader."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from psengine.verify.differences import KINDS, Difference
from psengine.verify.settings import Settings
from psengine.verify.side_by_side import Findings

EQUAL, WITHIN, DIFFERENT, REFUSED = "bitwise equal", "within tolerance", "different", "refused"
NOT_FINITE = "not finite"

# By strategy, the note on a difference from native DDP between several workers.
_EXPECTED = {
    "sync-server": "the servers add in rank order: with three workers and more gradients are added in another order,"
    " which rounds otherwise",
    "async": "async is another algorithm: the servers apply each worker's gradient when it arrives, nobody averages, so"
    " with two workers and more it takes other steps than native DDP. That is no fault; --rtol and --atol say what"
    " distance you accept",
}
_CONTROL_HINTS = (
    "state at module level (a generator, an iterator, a counter) is shared by the trainings: make it inside the"
    " target function",
    "time, os.urandom, an unseeded generator (numpy.random.default_rng(), random.Random()) or the order of a set"
    " differ from run to run",
    "kernels that add in changing order, on CUDA above all: torch.use_deterministic_algorithms(True) finds them",
)


@dataclass(frozen=True, kw_only=True)
class Control:
    """The reference, trained twice in processes of its own: whether the target gives the same numbers again.

    Attributes:
        reproducible: whether the two were bitwise equal.
        first: their first difference.
    """

    reproducible: bool
    first: Difference | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How a target trains under ``strategy``, against ``against``.

    Attributes:
        target: what was trained.
        strategy, against: the candidate and the reference: "native", or a strategy.
        world_size, steps, seed: of both.
        verdict: "bitwise equal", "within tolerance", "different"; "not finite", where both are NaN from the first
            step on, so that nothing was compared; of the zoo also "refused", where the strategy does not take the
            model.
        first: the earliest difference, over steps, then loss, buffers, gradients, parameters; None where there is none.
        first_beyond: the earliest that is beyond the tolerance.
        largest_absolute, largest_relative: the largest differences anywhere.
        history: for each step, and -1 for the start: largest absolute difference of each kind over all ranks, both
            losses (the mean over ranks), and the distance of the weights: the norm of candidate - reference, divided by
            that of the reference.
        counts: how many tensors of each kind were compared after each step.
        control: where the verdict is "different": the reference against itself.
        notes: what a reader should know, a sentence each.
    """

    target: str
    strategy: str
    against: str
    world_size: int
    steps: int
    seed: int
    verdict: str
    first: Difference | None = None
    first_beyond: Difference | None = None
    largest_absolute: Difference | None = None
    largest_relative: Difference | None = None
    history: tuple[dict[str, Any], ...] = ()
    counts: dict[str, int]
    control: Control | None = None
    notes: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether the verdict is "bitwise equal" or "within tolerance"."""
        return self.verdict in (EQUAL, WITHIN)

    def to_json(self) -> dict[str, Any]:
        """As dicts and lists for ``json.dumps``; numbers that are not finite become "inf", "-inf" and "nan"."""
        return _to_json(asdict(self))  # type: ignore[no-any-return]


def merge(
    reports: Sequence[Findings | str],
    target: str,
    settings: Settings,
    *,
    controls: Sequence[Findings | str] = (),
    why_no_control: str = "",
) -> Comparison:
    """Put the ranks' reports together: what each found, or why a strategy refuses the model.

    ``controls`` are their reports of ``settings.against`` in both places, from other processes: empty where that was
    not tried, or failed, and then ``why_no_control`` says why.
    """
    common: dict[str, Any] = {
        "target": target,
        **{key: getattr(settings, key) for key in ("strategy", "against", "world_size", "steps", "seed")},
    }
    refusals = [report for report in reports if isinstance(report, str)]
    if refusals:
        return Comparison(**common, verdict=REFUSED, counts={}, notes=(refusals[0],))
    findings = _findings(reports)
    first, first_beyond = _earliest(findings, "first"), _earliest(findings, "first_beyond")
    verdict = EQUAL if first is None else WITHIN if first_beyond is None else DIFFERENT
    steps = list(zip(*(finding.history for finding in findings), strict=True))
    blind_from = _blind_from(steps)
    if verdict != DIFFERENT and blind_from == 0:
        verdict = NOT_FINITE
    control = None
    if controls:
        control_first = _earliest(_findings(controls), "first")
        control = Control(reproducible=control_first is None, first=control_first)
    return Comparison(
        **common,
        verdict=verdict,
        first=first,
        first_beyond=first_beyond,
        largest_absolute=_largest(findings, "absolute"),
        largest_relative=_largest(findings, "relative"),
        history=tuple(map(_merge_step, steps)),
        counts=findings[0].counts,
        control=control,
        notes=tuple(_notes(verdict, control, why_no_control, settings, blind_from)),
    )


def is_different(reports: Sequence[Findings | str]) -> bool:
    """Whether the ranks' reports are of a difference beyond the tolerance, which a control should explain."""
    return any(finding.first_beyond is not None for finding in _findings(reports))


def _findings(reports: Sequence[Findings | str]) -> list[Findings]:
    return [report for report in reports if not isinstance(report, str)]


def _earliest(findings: Sequence[Findings], key: str) -> Difference | None:
    found: list[Difference] = list(filter(None, (getattr(finding, key) for finding in findings)))
    return min(found, key=lambda difference: difference.order, default=None)


def _largest(findings: Sequence[Findings], size: str) -> Difference | None:
    found: list[Difference] = list(filter(None, (getattr(finding, f"largest_{size}") for finding in findings)))
    return max(found, key=lambda difference: float(getattr(difference, size)), default=None)


def _merge_step(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The ranks' entries of a step as one: the largest differences, the mean of the losses."""
    merged: dict[str, Any] = {"step": entries[0]["step"]}
    for key in (*KINDS, "distance", "candidate_loss", "reference_loss"):
        values = [entry[key] for entry in entries if key in entry]
        if values and key.endswith("_loss"):
            merged[key] = sum(values) / len(values)
        elif values:
            merged[key] = math.nan if any(map(math.isnan, values)) else max(values)
    return merged


def _blind_from(steps: Sequence[Sequence[dict[str, Any]]]) -> int | None:
    """The first of the blind steps at the end of the training; None if the last step is not blind."""
    found = None
    for entries in reversed(steps):
        # One blind rank makes the others blind, through the averaged gradients.
        if not any(entry.get("is_blind", False) for entry in entries):
            break
        found = int(entries[0]["step"])
    return found


def _notes(
    verdict: str, control: Control | None, why_no_control: str, settings: Settings, blind_from: int | None
) -> list[str]:
    notes, against = [], settings.against
    if why_no_control:
        notes.append(f"no control: {against} against itself could not be tried: {why_no_control}")
    if control is not None and not control.reproducible:
        where = "" if control.first is None else f", first {control.first.where}"
        notes.append(f"the target itself is not reproducible: {against} differs from itself{where}")
        notes += [f"a likely cause: {hint}" for hint in _CONTROL_HINTS]
    elif control is not None:
        notes.append(
            f"control: {against} in both places, in fresh processes, is bitwise equal: the target repeats itself, and"
            f" the difference comes with {settings.strategy}"
        )
    if verdict in (WITHIN, DIFFERENT) and settings.world_size > 1:
        names = dict.fromkeys(exchange.partition(":")[0] for exchange in (settings.strategy, against))
        notes += [
            _EXPECTED[name] for name in names if name in _EXPECTED and (name == "async" or settings.world_size > 2)
        ]
    if blind_from is not None:
        notes.append(
            f"not finite from step {blind_from} on: the loss, or every gradient, is NaN or infinite under both. NaN"
            " equals NaN, so steps from there on compare nothing. A bad batch, or too large a learning rate?"
        )
    return notes


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(entry) for entry in value]
    # JSON has no names for infinity and NaN.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
