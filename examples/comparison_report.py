"""The table and the plot of compare_strategies.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from compare_strategies import Outcome

SMOOTHED_STEPS = 15  # a point of a curve is the mean of so many


def print_table(outcomes: list[Outcome], *, reference: str) -> bool:
    """Print one row for each strategy; return whether "sync" equals ``reference`` bit by bit, if both are there."""
    native = next(outcome for outcome in outcomes if outcome.strategy == reference)
    title = f"{len(native.losses)} workers, {len(native.losses[0])} steps each; accuracy on the test images"
    # Narrow gaps: the widest row has to fit a terminal of 80 columns.
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("strategy", "accuracy", "time", "off native by", "staleness"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right", no_wrap=True)
    is_equal = True
    for outcome in outcomes:
        difference = largest_difference(outcome, native)
        is_bitwise = has_equal_bits(outcome, native)
        if outcome.strategy == "sync":
            is_equal = is_bitwise
        shown = "-" if outcome is native else "0 (bitwise)" if is_bitwise else f"{difference:.2g}"
        table.add_row(
            outcome.strategy, f"{outcome.accuracy:.2%}", describe_time(outcome), shown, describe(outcome.staleness)
        )
    console = Console()
    console.print(table)
    console.print(
        "time: until the first and the last worker were done; off by: the largest difference"
        " of a weight; staleness: mean (largest)\n"
    )
    return is_equal


def largest_difference(outcome: Outcome, other: Outcome) -> float:
    """Of rank 0's parameters and buffers, in absolute value; not a number where one is."""
    pairs = ((tensor.double(), other.state[name].double()) for name, tensor in outcome.state.items())
    return torch.stack([(a - b).abs().max() for a, b in pairs]).max().item()  # Python's max would pass over a NaN


def has_equal_bits(outcome: Outcome, other: Outcome) -> bool:
    pairs = ((tensor, other.state[name]) for name, tensor in outcome.state.items())
    return all(torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)) for a, b in pairs)


def describe_time(outcome: Outcome) -> str:
    """Until the last worker was done; where another was done much sooner, from then on."""
    first_s = min(times[-1] for times in outcome.finished_s)
    is_spread = first_s < 0.8 * outcome.seconds
    return f"{first_s:.1f}-{outcome.seconds:.1f} s" if is_spread else f"{outcome.seconds:.1f} s"


def describe(staleness: dict[int, int]) -> str:
    count = sum(staleness.values())
    if not count:
        return "0"
    return f"{sum(value * n for value, n in staleness.items()) / count:.2f} ({max(staleness)})"


def plot_losses(outcomes: list[Outcome], path: Path) -> Path:
    """Draw the loss against steps and against seconds, averaged over workers and smoothed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, (by_step, by_time) = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for position, outcome in enumerate(outcomes):
        steps, losses = smoothed(outcome.losses)
        _, seconds = smoothed(outcome.finished_s)
        # Curves that are equal lie on each other: the first is drawn wide, so that both are seen.
        style = {"linewidth": 5, "alpha": 0.35} if position == 0 else {"linewidth": 1.4}
        by_step.plot(steps, losses, label=outcome.strategy, **style)
        by_time.plot(seconds, losses, label=outcome.strategy, **style)
    by_step.set_xlabel("steps of each worker")
    by_time.set_xlabel("seconds")
    by_step.set_ylabel("training loss")
    by_step.set_yscale("log")
    by_step.legend()
    for axes in (by_step, by_time):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def smoothed(values: list[list[float]]) -> tuple[list[int], list[float]]:
    """(steps, means over workers and the latest steps)."""
    means = [sum(column) / len(column) for column in zip(*values, strict=True)]
    windows = [means[max(0, end - SMOOTHED_STEPS) : end] for end in range(1, len(means) + 1)]
    return list(range(1, len(means) + 1)), [sum(window) / len(window) for window in windows]
