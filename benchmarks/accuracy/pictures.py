"""Learning against samples, and against modelled time: a line for the mean over seeds, a band for their spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accuracy.outcomes import Link, by_candidate, seconds_of
from accuracy.studies import Study
from accuracy.tasks import task_of
from accuracy.trainings import Run
from harness import pictures

PANEL_INCHES = (5.2, 3.8)


def draw(study: Study, runs: Sequence[Run], links: Mapping[tuple[str, str], Link], path: Path) -> None:
    """A row for each task; a column for each panel of the study, and one for time where it is modelled."""
    pyplot = pictures.require_matplotlib()
    tasks = list(dict.fromkeys(run.plan.task for run in runs))
    panels = dict(study.panels) or {"": list(study.candidates)}
    columns = [(title, names, False) for title, names in panels.items()]
    if study.mbit is not None:
        title, names = next(iter(panels.items()))
        columns.append((f"{title}, {study.mbit:g} Mbit/s", names, True))
    size = (PANEL_INCHES[0] * len(columns), PANEL_INCHES[1] * len(tasks))
    figure, grid = pyplot.subplots(len(tasks), len(columns), figsize=size, squeeze=False)
    for task, row in zip(tasks, grid, strict=True):
        found = by_candidate([run for run in runs if run.plan.task == task])
        reference = found.get(study.reference) or next(iter(found.values()))
        place, limits = (1, _limits(reference)) if study.draws_loss else (2, (0.0, 100.0))
        for axes, (title, names, is_time) in zip(row, columns, strict=True):
            for number, name in enumerate(names):
                if name in found:
                    link = links[task, name] if is_time else None
                    _line(axes, found[name], place, link, label=name, color=f"C{number % 10}")
            axes.set(xscale="log", ylim=limits, ylabel="loss, nats" if place == 1 else task_of(task).measure)
            axes.xaxis.set_minor_formatter("")
            axes.set_xlabel("modelled seconds" if is_time else "samples of all workers")
            axes.set_title(f"{task}{': ' if title else ''}{title}", fontsize=10)
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7)
    figure.tight_layout()
    pictures.save(figure, path)


def _limits(reference: Sequence[Run]) -> tuple[float, float]:
    """Around the reference's curve, so that a candidate that diverges leaves the picture."""
    losses = [point[1] for run in reference for point in run.curve]
    margin = 0.05 * (max(losses) - min(losses))
    return min(losses) - margin, max(losses) + 5 * margin


def _line(axes: Any, runs: Sequence[Run], place: int, link: Link | None, **style: str) -> None:
    import numpy as np

    samples = [point[0] for point in runs[0].curve]
    abscissae = samples if link is None else [seconds_of(runs[0], link, count) for count in samples]
    values = np.array([[point[place] for point in run.curve] for run in runs])
    mean, spread = values.mean(axis=0), values.std(axis=0, ddof=1 if len(runs) > 1 else 0)
    axes.plot(abscissae, mean, linewidth=1.3, marker="o", markersize=2, **style)
    axes.fill_between(abscissae, mean - spread, mean + spread, color=style["color"], alpha=0.15)
