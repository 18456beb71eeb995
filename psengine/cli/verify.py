"""``psengine verify``: is training under psengine what it is under native DDP? A table of the built-in models, or a
report on a target of one's own.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from psengine.verify import Comparison, Difference

EXIT_DIFFERENT, EXIT_FAILED = 1, 3
MAX_ROWS = 24
_COLORS = {
    "bitwise equal": "green",
    "within tolerance": "yellow",
    "different": "red",
    "not finite": "red",
    "refused": "magenta",
}
_EXAMPLES = """
[bold]Examples[/bold]

  psengine verify                                       the built-in models under "sync"

  psengine verify train.py:target                       yours: returns (model, batch_fn, loss_fn, optimizer_fn)

  psengine verify train.py:target --strategy sync-server --world-size 3

  psengine verify train.py:target --strategy sync-server:compress=int8

  psengine verify train.py:target --strategy async:staleness_scaling=inverse --against sync --rtol 0.1

  psengine verify train.py:target --strategy native     is it reproducible at all?

[bold]Exit codes[/bold]: 0 equal or within tolerance, 1 different or not finite, 2 wrong arguments or target, 3 failed.
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EXAMPLES)(verify)


def verify(
    target: Annotated[
        str | None,
        typer.Argument(help="module:function or path/to/file.py:function; without it, the built-in models."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps (default: 10; of the built-in models 6).")] = None,
    world_size: Annotated[int, typer.Option("--world-size", "-w", help="Ranks, processes here; at most 64.")] = 2,
    strategy: Annotated[str, typer.Option(help="What to test: a strategy, or native.")] = "sync",
    against: Annotated[
        str,
        typer.Option(help="What to compare it with: native, or a strategy."),
    ] = "native",
    seed: Annotated[int, typer.Option(help="Seed of the model, dropout, ...")] = 0,
    rtol: Annotated[
        float | None, typer.Option(help="Tolerance relative to a tensor's largest magnitude (default: by dtype).")
    ] = None,
    atol: Annotated[float | None, typer.Option(help="Absolute tolerance (default: by dtype).")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    timeout_s: Annotated[float, typer.Option("--timeout-s", help="Deadline of the whole run, in seconds.")] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON alone on standard output.")] = False,
) -> None:
    """Train under native DDP and under psengine from the same seed; find the first difference.

    Both run in the same processes, in turn, and draw the same random numbers. After each step losses, buffers,
    gradients and parameters are compared, to the bit.
    """
    from psengine.verify import RankFailedError, Settings, compare, compare_zoo
    from psengine.verify.target import check_name

    settings = Settings(
        steps=steps if steps is not None else 6 if target is None else 10,
        world_size=world_size,
        strategy=strategy,
        against=against,
        seed=seed,
        rtol=rtol,
        atol=atol,
        device=device,
        timeout_s=timeout_s,
    )
    if target is not None:
        place, _ = check_name(target)
        print(f"loading {place} on each rank, which runs all that stands at its top level", file=sys.stderr)
    begin_s = time.monotonic()
    try:
        with Console(stderr=True).status("starting the ranks") as status:

            def show(text: str) -> None:
                status.update(Text(f"rank 0: {text}"))

            if target is None:
                found = compare_zoo(settings=settings, on_note=show)
            else:
                found = [compare(target, settings, on_note=show)]
    except RankFailedError as error:
        print(f"{error.rank_traceback}psengine: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED) from None
    agrees = all(comparison.agrees or comparison.verdict == "refused" for comparison in found)
    elapsed_s = time.monotonic() - begin_s
    if as_json:
        results = [comparison.to_json() for comparison in found]
        document = results[0] if target is not None else {"agrees": agrees, "elapsed_s": elapsed_s, "models": results}
        print(json.dumps(document, indent=1, allow_nan=False))
    elif target is not None:
        _print_report(found[0], elapsed_s)
    else:
        _print_zoo(found, elapsed_s)
    raise typer.Exit(0 if agrees else EXIT_DIFFERENT)


def _print_report(found: Comparison, elapsed_s: float) -> None:
    console = Console(highlight=False)
    trained = f"{_ranks(found)}, {found.steps} steps, seed {found.seed}"
    _say(console, f"{found.target}: {found.strategy} against {found.against}, {trained}")
    titles: dict[Difference, list[str]] = {}
    for what, difference in (
        ("first difference", found.first),
        ("first beyond tolerance", found.first_beyond if found.first_beyond != found.first else None),
        ("largest absolute difference", found.largest_absolute),
        ("largest relative difference", found.largest_relative),
    ):
        if difference is not None:
            titles.setdefault(difference, []).append(what)
    for difference, whats in titles.items():
        _say(console, (f"{', '.join(whats)}: ", "bold"), _place(difference))
        _say(console, f"    {_numbers(difference, found)}")
    if found.first is not None:
        _print_history(console, found)
    for note in found.notes:
        _say(console, f"- {note}")
    counts = ", ".join(f"{number} {kind}s" for kind, number in found.counts.items() if kind != "loss" and number)
    _say(
        console,
        ("verdict: ", "bold"),
        (found.verdict, f"bold {_COLORS[found.verdict]}"),
        f" ({counts} and the loss, on each rank after each step; {elapsed_s:.1f} s)",
    )


def _say(console: Console, *parts: str | tuple[str, str]) -> None:
    """Print a line, however long; a part may have a style."""
    console.print(Text.assemble(*parts), soft_wrap=True)


def _print_history(console: Console, found: Comparison) -> None:
    """What each step's largest differences are: how fast two update rules drift apart."""
    assert found.first is not None
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("step", "loss", "buffers", "gradients", "parameters", "weights"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in (found.strategy, found.against):
        table.add_column(Text(name), justify="right", overflow="fold")
    stride = -(-len(found.history) // MAX_ROWS)
    for place, entry in enumerate(found.history):
        if place % stride and entry["step"] not in (found.first.step, found.steps - 1):
            continue
        cells = [_number(entry.get(key)) for key in ("loss", "buffer", "gradient", "parameter", "distance")]
        losses = [_number(entry.get(key), digits=6) for key in ("candidate_loss", "reference_loss")]
        table.add_row("start" if entry["step"] < 0 else str(entry["step"]), *cells, *losses)
    _say(console, "after each step: largest absolute differences; distance of the weights, relative; the losses")
    console.print(table)


def _print_zoo(found: list[Comparison], elapsed_s: float) -> None:
    from psengine.verify.zoo import ZOO

    console = Console(highlight=False)
    first = found[0]
    table = Table(box=None, padding=(0, 2, 0, 0))
    any_differs = any(comparison.first is not None for comparison in found)
    for heading in ("model", "verdict", *(("largest", "first difference") if any_differs else ("what it asks for",))):
        table.add_column(heading, overflow="fold")
    for comparison in found:
        cells = ["", ""] if any_differs else [ZOO[comparison.target].asks]
        if comparison.first is not None and comparison.largest_absolute is not None:
            where = (comparison.first_beyond or comparison.first).where
            cells = [_number(comparison.largest_absolute.absolute), where]
        verdict = Text(comparison.verdict, style=_COLORS[comparison.verdict])
        table.add_row(comparison.target, verdict, *map(Text, cells))
    console.print(table)
    for note in dict.fromkeys(note for comparison in found for note in comparison.notes):
        _say(console, f"- {note}")
    counts = {verdict: sum(c.verdict == verdict for c in found) for verdict in _COLORS}
    summary = ", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number)
    trained = f"{_ranks(first)}, {first.steps} steps of {len(found)} models"
    _say(console, (f"{first.strategy} against {first.against}, {trained}: {summary} ({elapsed_s:.1f} s)", "bold"))


def _ranks(found: Comparison) -> str:
    return "1 rank" if found.world_size == 1 else f"{found.world_size} ranks"


def _place(difference: Difference) -> str:
    where = difference.where
    if difference.index:
        where += f", at {list(difference.index)}"
    if difference.numel > 1:
        where += f" ({difference.differing} of {difference.numel} numbers differ)"
    return where


def _numbers(difference: Difference, found: Comparison) -> str:
    if difference.note:
        return difference.note.replace("candidate", found.strategy).replace("reference", found.against)
    values = f"{_number(difference.candidate, 9)} under {found.strategy}, {_number(difference.reference, 9)} under"
    sizes = f"absolute {_number(difference.absolute)}, relative {_number(difference.relative)}"
    return f"{values} {found.against}: {sizes}"


def _number(value: Any, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}g}"
