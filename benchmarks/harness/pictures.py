"""Pictures: candidates beside each other, and cost against size with the fitted exponent. Small files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.figures import Spread, exponent

from psengine.environment.installation import install_command

if TYPE_CHECKING:
    from harness.record import Record

DPI = 70


def require_matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        sys.exit(f"a picture needs matplotlib: {install_command('examples')}")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path) -> None:
    """In few colours' worth of bytes, and without the date: the same figures give the same file."""
    figure.savefig(path, dpi=DPI, metadata={"Software": None}, bbox_inches="tight")
    require_matplotlib().close(figure)


def draw(record: Record, path: Path) -> None:
    if record.axis is not None:
        _draw_growth(record, path)
    elif record.cases:
        _draw_comparison(record, path)


def _draw_comparison(record: Record, path: Path) -> None:
    """A panel for each case: median and spread of every candidate."""
    pyplot = require_matplotlib()
    columns = min(2, len(record.cases))
    rows = -(-len(record.cases) // columns)
    height = sum(0.9 + 0.22 * max(len(case.seconds) for case in record.cases) for _ in range(rows))
    figure, grid = pyplot.subplots(rows, columns, figsize=(5.5 * columns, height), squeeze=False)
    panels = list(grid.flat)
    for axes, case in zip(panels, record.cases, strict=False):
        spreads = [Spread.of(seconds) for seconds in case.seconds.values()]
        unit, factor = ("ms", 1e3) if max(s.median for s in spreads) >= 1e-3 else ("µs", 1e6)
        values = [factor * s.median for s in spreads]
        errors = [
            [max(0.0, factor * (s.median - s.low)) for s in spreads],
            [max(0.0, factor * (s.high - s.median)) for s in spreads],
        ]
        colours = ["tab:gray" if name in (*record.peers, record.baseline) else "tab:blue" for name in case.seconds]
        axes.barh(list(case.seconds), values, xerr=errors, color=colours, error_kw={"linewidth": 0.8})
        axes.invert_yaxis()
        if max(values) > 20 * min(values):
            axes.set_xscale("log")
        axes.set_title(", ".join(f"{name} {value}" for name, value in case.labels.items()), fontsize=9)
        axes.set_xlabel(unit, fontsize=8)
        axes.tick_params(labelsize=8)
    for axes in panels[len(record.cases) :]:
        axes.set_axis_off()
    figure.tight_layout()
    save(figure, path)


def _draw_growth(record: Record, path: Path) -> None:
    """A panel for each question: cost against size, both logarithmic, with the exponent of each candidate's fit."""
    pyplot = require_matplotlib()
    curves = growth_curves(record)
    questions = list(dict.fromkeys(question for question, _ in curves))
    rows = -(-len(questions) // 2)
    figure, grid = pyplot.subplots(rows, 2, figsize=(11, 3.6 * rows), squeeze=False)
    panels = list(grid.flat)
    for axes, question in zip(panels, questions, strict=False):
        for (own, candidate), points in curves.items():
            if own == question:
                sizes, costs = zip(*points, strict=True)
                label = f"{candidate}: size^{exponent(sizes, costs):.2f}" if len(points) > 1 else candidate
                axes.plot(sizes, [1e3 * cost for cost in costs], marker="o", markersize=3, linewidth=1, label=label)
        axes.set_xscale("log")
        axes.set_yscale("log")
        ticks = sorted({size for (own, _), points in curves.items() if own == question for size, _ in points})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_title(question, fontsize=9)
        axes.set_ylabel("ms", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    for axes in panels[len(questions) :]:
        axes.set_axis_off()
    figure.tight_layout()
    save(figure, path)


def growth_curves(record: Record) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """(question, candidate) -> (size, median cost in seconds), sizes rising; a cost over the baseline's if it grows."""
    curves: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for case in record.cases:
        for name, seconds in case.seconds.items():
            over = case.overhead(name, record.baseline)
            if name == record.baseline:
                continue
            cost = Spread.of(seconds).median if over is None else over.median
            if cost > 0:
                curves.setdefault((case.labels["question"], name), []).append((case.labels[record.axis], cost))
    return {key: sorted(points) for key, points in curves.items()}
