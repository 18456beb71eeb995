"""From runs to tables: means over seeds with their standard deviation, at equal samples and at equal time. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accuracy.studies import Study
from accuracy.tasks import Task
from accuracy.trainings import Run
from harness.figures import duration, number
from harness.tables import Table

DIVERGED = 1000.0  # nats, which is also more than any percentage


@dataclass(frozen=True, kw_only=True)
class Link:
    """A modelled step: computing, then sending ``sent_bytes`` from each host."""

    sent_bytes: float
    step_s: float


def by_candidate(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """In the order of their first runs; seeds in their order."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.plan.candidate, []).append(run)
    return {name: sorted(own, key=lambda run: run.plan.seed) for name, own in found.items()}


def mean_text(values: Sequence[float], places: int) -> str:
    """Mean ± standard deviation over seeds; "diverged" where a run's loss left all bounds."""
    if diverged := sum(not abs(value) < DIVERGED for value in values):
        return f"diverged ({diverged} of {len(values)})"
    spread = f" ± {statistics.stdev(values):.{places}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{places}f}{spread}"


def equal_samples(study: Study, task: Task, runs: Sequence[Run]) -> Table:
    """What each candidate has learnt at its end."""
    found = by_candidate(runs)
    columns = ["candidate", task.measure, "loss, nats", f"loss - {study.reference}'s, same seed"]
    has_staleness = any(run.staleness for run in runs)
    columns += ["staleness"] if has_staleness else []
    columns += ["papers', theirs"]
    rows = []
    for name, own in found.items():
        losses, wrong = ([run.curve[-1][place] for run in own] for place in (1, 2))
        row = [name, mean_text(wrong, 2), mean_text(losses, 4)]
        others = {run.plan.seed: run.curve[-1][1] for run in found.get(study.reference, ())}
        is_compared = name != study.reference and all(run.plan.seed in others for run in own)
        differences = (
            [loss - others[run.plan.seed] for run, loss in zip(own, losses, strict=True)] if is_compared else []
        )
        row.append(mean_text(differences, 4) if differences else "")
        row += [f"{statistics.mean(run.staleness or 0.0 for run in own):.1f}"] if has_staleness else []
        rows.append([*row, study.candidates[name].paper])
    one = runs[0].plan
    title = (
        f"{task.name}: {one.samples} samples, {len({run.plan.seed for run in runs})} seeds, mean ± standard deviation"
    )
    return Table(f"{title}. Papers' figures: {study.paper}", columns, rows)


def equal_time(study: Study, task: Task, runs: Sequence[Run], links: Mapping[tuple[str, str], Link]) -> Table:
    """What each candidate has learnt when the first one ends, on a modelled link."""
    found = by_candidate(runs)
    own_links = {name: links[task.name, name] for name in found}
    total_s = {name: own_links[name].step_s * own[0].plan.steps for name, own in found.items()}
    end_s = min(total_s.values())
    columns = ["candidate", "kB a host sends, a step", "modelled step", "all samples"]
    columns += [f"÷ {study.reference}'s", f"{task.measure}, after {duration(end_s)}", f"loss after {duration(end_s)}"]
    rows = []
    for name, own in found.items():
        wrong, losses = ([at_time(run, own_links[name], end_s, place) for run in own] for place in (2, 1))
        ratio = number(total_s[name] / total_s[study.reference]) if study.reference in total_s else ""
        rows.append(
            [
                name,
                number(own_links[name].sent_bytes / 1e3),
                duration(own_links[name].step_s),
                duration(total_s[name]),
                ratio,
                mean_text(wrong, 2),
                mean_text(losses, 4),
            ]
        )
    hosts = runs[0].plan.workers
    title = f"{task.name}, at equal time: {hosts} hosts with links of {study.mbit:g} Mbit/s, modelled"
    return Table(title, columns, rows)


def at_time(run: Run, link: Link, second: float, place: int) -> float:
    """The curve's value at a modelled time; between two points as a line over the logarithm of time.

    Before the first point: the first one's.
    """
    points = [(seconds_of(run, link, point[0]), point[place]) for point in run.curve]
    earlier = [point for point in points if point[0] <= second]
    later = [point for point in points if point[0] > second]
    if not earlier or not later:
        return (earlier or later)[-1 if earlier else 0][1]
    (from_s, before), (to_s, after) = earlier[-1], later[0]
    share = math.log(second / from_s) / math.log(to_s / from_s)
    return before + share * (after - before)


def seconds_of(run: Run, link: Link, samples: int) -> float:
    """When so many samples are learnt from, on a modelled link."""
    return samples / (run.plan.workers * run.plan.batch_size) * link.step_s
