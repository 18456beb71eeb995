"""The result of a comparison: the ranks' findings merged, the verdict, and notes for the reader."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from psengine.verify.differences import KINDS, Difference, finite_or_name

EQUAL, WITHIN, DIFFERENT, REFUSED = "bitwise equal", "within tolerance", "different", "refused"
NOT_FINITE = "not finite"

_SUMS = "gradients are added in another order, which rounds otherwise"
# By strategy, what to say where a training differs from native DDP's, and more than one worker takes part.
_EXPECTED = {
    "sync": "with three ranks and more, shared memory adds in rank order where gloo adds in ring order: "
    + _SUMS
    + ". PSENGINE_COLLECTIVE=c10d adds as native DDP does",
    "sync-server": "the servers add in rank order: with three workers and more " + _SUMS,
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
        fields = asdict(self)
        for key in ("first", "first_beyond", "largest_absolute", "largest_relative"):
            found: Difference | None = getattr(self, key)
            fields[key] = None if found is None else found.to_json()
        if self.control is not None:
            first = self.control.first
            fields["control"]["first"] = None if first is None else first.to_json()
        return fields


def merge(
    reports: Sequence[dict[str, Any]],
    *,
    target: str,
    strategy: str,
    against: str,
    steps: int,
    seed: int,
    controls: Sequence[dict[str, Any]] = (),
    why_no_control: str = "",
) -> Comparison:
    """Put the ranks' reports (``worker.compare_target``) together.

    ``controls`` are their reports of ``against`` in both places, from other processes: empty where that was not tried,
    or failed, and then ``why_no_control`` says why.
    """
    common: dict[str, Any] = {
        "target": target,
        "strategy": strategy,
        "against": against,
        "world_size": len(reports),
        "steps": steps,
        "seed": seed,
    }
    refusals = [report["refused"] for report in reports if "refused" in report]
    if refusals:
        return Comparison(**common, verdict=REFUSED, counts={}, notes=(refusals[0],))
    findings = [report["findings"] for report in reports]
    first = _earliest(findings, "first")
    first_beyond = _earliest(findings, "first_beyond")
    verdict = EQUAL if first is None else WITHIN if first_beyond is None else DIFFERENT
    blind_from = _blind_from([finding["history"] for finding in findings])
    if verdict != DIFFERENT and blind_from == 0:
        verdict = NOT_FINITE
    control = None
    if controls:
        control_first = _earliest([report["findings"] for report in controls], "first")
        control = Control(reproducible=control_first is None, first=control_first)
    return Comparison(
        **common,
        verdict=verdict,
        first=first,
        first_beyond=first_beyond,
        largest_absolute=_largest(findings, "largest_absolute", "absolute"),
        largest_relative=_largest(findings, "largest_relative", "relative"),
        history=tuple(_merge_step([finding["history"][i] for finding in findings]) for i in range(steps + 1)),
        counts=findings[0]["counts"],
        control=control,
        notes=(
            *_notes(verdict, control, why_no_control, strategy, against, len(reports)),
            *_notes_on_blindness(blind_from),
        ),
    )


def _earliest(findings: Sequence[dict[str, Any]], key: str) -> Difference | None:
    found = [Difference.from_json(finding[key]) for finding in findings if finding[key] is not None]
    return min(found, key=lambda difference: difference.order, default=None)


def _largest(findings: Sequence[dict[str, Any]], key: str, attribute: str) -> Difference | None:
    found = [Difference.from_json(finding[key]) for finding in findings if finding[key] is not None]
    return max(found, key=lambda difference: float(getattr(difference, attribute)), default=None)


def _merge_step(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {"step": entries[0]["step"]}
    for key in (*KINDS, "distance"):
        values = [float(entry[key]) for entry in entries if key in entry]
        if values:
            merged[key] = finite_or_name(math.nan if any(map(math.isnan, values)) else max(values))
    for key in ("candidate_loss", "reference_loss"):
        values = [float(entry[key]) for entry in entries if key in entry]
        if values:
            merged[key] = finite_or_name(sum(values) / len(values))
    return merged


def _blind_from(histories: Sequence[Sequence[dict[str, Any]]]) -> int | None:
    """The step from which on, to the last, equality says nothing; None where the last still says something."""
    found = None
    for entries in reversed(list(zip(*histories, strict=True))):
        # Every rank's gradients are in the others' weights.
        if not any(entry.get("is_blind", False) for entry in entries):
            break
        found = int(entries[0]["step"])
    return found


def is_different(reports: Sequence[dict[str, Any]]) -> bool:
    """Whether the ranks' reports are of a difference beyond the tolerance, which a control should explain."""
    return any("findings" in report and report["findings"]["first_beyond"] is not None for report in reports)


def _notes(
    verdict: str, control: Control | None, why_no_control: str, strategy: str, against: str, world_size: int
) -> list[str]:
    notes = []
    if why_no_control:
        notes.append(f"no control: {against} against itself could not be tried: {why_no_control}")
    if control is not None and not control.reproducible:
        where = "" if control.first is None else f", first {place_of(control.first)}"
        notes.append(f"the target itself is not reproducible: {against} differs from itself{where}")
        notes += [f"a likely cause: {hint}" for hint in _CONTROL_HINTS]
    elif control is not None:
        notes.append(
            f"control: {against} in both places, in fresh processes, is bitwise equal: the target repeats itself, and"
            f" the difference comes with {strategy}"
        )
    if verdict in (WITHIN, DIFFERENT) and world_size > 1:
        names = dict.fromkeys(exchange.partition(":")[0] for exchange in (strategy, against))
        notes += [_EXPECTED[name] for name in names if name in _EXPECTED and (name == "async" or world_size > 2)]
    return notes


def _notes_on_blindness(blind_from: int | None) -> list[str]:
    if blind_from is None:
        return []
    return [
        f"not finite from step {blind_from} on: the loss, or every gradient, is NaN or infinite under both. NaN equals"
        " NaN, so steps from there on compare nothing. A bad batch, or too large a learning rate?"
    ]


def place_of(difference: Difference) -> str:
    """Such as "at step 3, gradient of 0.weight, rank 1"."""
    step = "before the first step" if difference.step < 0 else f"at step {difference.step}"
    return f"{step}, {difference.what}, rank {difference.rank}"
