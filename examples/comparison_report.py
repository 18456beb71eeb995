"""The table and the plot of compare_strategies.py."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from compare_strategies import Outcome

SMOOTHED_STEPS = 5  # a point of a curve is the mean of so many


def print_table(outcomes: list[Outcome], *, reference: str, momentum: float) -> bool:
    """Print one row for each strategy; return whether "sync" equals ``reference`` bit by bit, if both are there."""
    native = next(outcome for outcome in outcomes if outcome.strategy == reference)
    count, first = len(native.trainings), native.trainings[0]
    title = f"{count} trainings of each, {len(first.losses)} workers, {len(first.losses[0])} steps each"
    # Narrow gaps: the widest row has to fit a terminal of 80 columns.
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    for heading in ("strategy", "accuracy", "loss", "above native", "seconds", "stale"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right", no_wrap=True)
    is_equal = True
    for outcome in outcomes:
        is_bitwise = has_equal_bits(outcome, native)
        if outcome.strategy == "sync":
            is_equal = is_bitwise
        above = "-" if outcome is native else "0 (same bits)" if is_bitwise else describe_difference(outcome, native)
        loss = f"{mean_losses(outcome).mean():.4f}"
        table.add_row(
            *(outcome.strategy, describe_accuracy(outcome), loss, above),
            *(describe_time(outcome), describe_staleness(outcome)),
        )
    console = Console(highlight=False)
    console.print(table)
    rates = {outcome.strategy: f"{outcome.learning_rate:g}" for outcome in outcomes}
    divided = [name for name, rate in rates.items() if rate != rates[reference]]
    lines = [
        f"accuracy, loss: on test images that the training did not see; \u00b1 binomial standard error of"
        f" {native.test_images} images",
        f"above native: test loss less native DDP's with the same first weights, mean of {count} trainings; \u00b1"
        " standard error",
        "seconds: all trainings, until the first and the last worker were done; stale: mean staleness",
        f"learning rate {rates[reference]}, momentum {momentum:g}"
        + (f"; learning rate {rates[divided[0]]} for {', '.join(divided)}" if divided else ""),
    ]
    console.print("\n".join(lines) + "\n", soft_wrap=True)
    return is_equal


def has_equal_bits(outcome: Outcome, other: Outcome) -> bool:
    """Whether rank 0's parameters and buffers are the same after every training."""
    return all(
        torch.equal(tensor.reshape(-1).view(torch.uint8), theirs.state[name].reshape(-1).view(torch.uint8))
        for own, theirs in zip(outcome.trainings, other.trainings, strict=True)
        for name, tensor in own.state.items()
    )


def mean_losses(outcome: Outcome) -> torch.Tensor:
    """The test loss of each training."""
    return torch.stack([training.test_losses.double().mean() for training in outcome.trainings])


def describe_accuracy(outcome: Outcome) -> str:
    """Percent, and the binomial standard error of that many different test images."""
    accuracy = torch.cat([training.is_correct for training in outcome.trainings]).double().mean().item()
    return f"{accuracy:.1%} \u00b1{100 * math.sqrt(accuracy * (1 - accuracy) / outcome.test_images):.1f}"


def describe_difference(outcome: Outcome, native: Outcome) -> str:
    """Mean and standard error, over trainings, of the test loss less native's in the same run."""
    differences = mean_losses(outcome) - mean_losses(native)
    if len(differences) == 1:
        return f"{differences.item():+.4f}"
    return f"{differences.mean():+.4f} \u00b1{differences.std() / math.sqrt(len(differences)):.4f}"


def describe_time(outcome: Outcome) -> str:
    """Until the last worker was done; where another was done much sooner, from then on."""
    seconds = sum(training.seconds for training in outcome.trainings)
    first_s = sum(min(times[-1] for times in training.finished_s) for training in outcome.trainings)
    return f"{first_s:.1f}-{seconds:.1f}" if first_s < 0.8 * seconds else f"{seconds:.1f}"


def describe_staleness(outcome: Outcome) -> str:
    counts: Counter[int] = Counter()
    for training in outcome.trainings:
        counts.update(training.staleness)
    return f"{sum(value * n for value, n in counts.items()) / counts.total():.2f}" if counts else "0"


def plot_losses(outcomes: list[Outcome], path: Path) -> Path:
    """Draw the loss against steps and against seconds, averaged over trainings and workers, and smoothed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, (by_step, by_time) = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for position, outcome in enumerate(outcomes):
        steps, losses = smoothed([losses for training in outcome.trainings for losses in training.losses])
        _, seconds = smoothed([times for training in outcome.trainings for times in training.finished_s])
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
    """(steps, means over the rows and the latest steps)."""
    means = [sum(column) / len(column) for column in zip(*values, strict=True)]
    windows = [means[max(0, end - SMOOTHED_STEPS) : end] for end in range(1, len(means) + 1)]
    return list(range(1, len(means) + 1)), [sum(window) / len(window) for window in windows]
