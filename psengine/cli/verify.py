"""``psengine verify``: at which step and parameter does a strategy differ from native DDP, or from another?"""

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
    from psengine.verify import Comparison, Difference, Settings

EXIT_DIFFERENT, EXIT_FAILED = 1, 3
MAX_ROWS = 24
_COLORS = {"bitwise equal": "green", "within tolerance": "yellow", "different": "red", "not finite": "red"}
_EXAMPLES = """
[bold]Examples[/bold]

  psengine verify train.py:make_target                  it returns (model, batch_fn, loss_fn, optimizer_fn)

  psengine verify train.py:make_target --strategy sync-server --world-size 3

  psengine verify train.py:make_target --strategy async:staleness_scaling=inverse --against sync

[bold]Exit codes[/bold]: 0 equal or within tolerance, 1 different or not finite, 2 wrong arguments or target, 3 failed.
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EXAMPLES)(verify)


def verify(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="Your function, as module:function or path/to/file.py:function.")],
    steps: Annotated[int, typer.Option(help="Training steps.")] = 10,
    world_size: Annotated[int, typer.Option("--world-size", "-w", help="Ranks, processes here; at most 64.")] = 2,
    strategy: Annotated[str, typer.Option(help="What to test: a strategy, or native.")] = "sync",
    against: Annotated[str, typer.Option(help="What to compare it with: native for native DDP, or a strategy.")] = (
        "native"
    ),
    seed: Annotated[int, typer.Option(help="Seed of the model, dropout, ...")] = 0,
    rtol: Annotated[
        float | None, typer.Option(help="Tolerance relative to a tensor's largest magnitude (default: by dtype).")
    ] = None,
    atol: Annotated[float | None, typer.Option(help="Absolute tolerance (default: by dtype).")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    timeout_s: Annotated[float, typer.Option("--timeout-s", help="Deadline of the whole run, in seconds.")] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON alone on standard output.")] = False,
) -> None:
    """Train your model under two strategies from the same seed; find the first difference.

    Both train in the same processes, in turn, and draw the same random numbers. After each step losses, buffers,
    gradients and parameters are compared, to the bit.
    """
    from psengine.verify import RankFailedError, Settings, compare
    from psengine.verify.comparison import check_name

    settings = Settings(**{name: value for name, value in context.params.items() if name not in ("target", "as_json")})
    print(f"loading {check_name(target)[0]} on each rank, which runs all that stands at its top level", file=sys.stderr)
    begin_s = time.monotonic()
    try:
        with Console(stderr=True).status("starting the ranks") as status:
            found = compare(target, settings, on_note=lambda text: status.update(Text(f"rank 0: {text}")))
    except RankFailedError as error:
        print(f"{error.rank_traceback}psengine: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED) from None
    if as_json:
        print(json.dumps(found.to_json(), indent=1, allow_nan=False))
    else:
        print_report(found, time.monotonic() - begin_s)
    raise typer.Exit(0 if found.agrees else EXIT_DIFFERENT)


def print_report(found: Comparison, elapsed_s: float) -> None:
    """The report for people."""
    console, settings = Console(highlight=False), found.settings
    ranks = "1 rank" if settings.world_size == 1 else f"{settings.world_size} ranks"
    trained = f"{ranks}, {settings.steps} steps, seed {settings.seed}"
    _say(console, f"{found.target}: {settings.strategy} against {settings.against}, {trained}")
    beyond = None if found.first_beyond == found.first else found.first_beyond
    for title, difference in (("first difference", found.first), ("first beyond tolerance", beyond)):
        if difference is not None:
            _say(console, (f"{title}: ", "bold"), _place(difference))
            _say(console, f"    {_numbers(difference, settings)}")
    if found.first is not None:
        _print_history(console, found)
    for note in found.notes:
        _say(console, f"- {note}")
    counts = ", ".join(f"{number} {kind}s" for kind, number in found.counts.items() if kind != "loss" and number)
    ending = f" ({counts} and the loss, on each rank after each step; {elapsed_s:.1f} s)"
    _say(console, ("verdict: ", "bold"), (found.verdict, f"bold {_COLORS[found.verdict]}"), ending)


def _say(console: Console, *parts: str | tuple[str, str]) -> None:
    """Print a line, however long; a part may have a style."""
    console.print(Text.assemble(*parts), soft_wrap=True)


def _print_history(console: Console, found: Comparison) -> None:
    """Each step's largest differences: how fast the two drift apart."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("step", "loss", "buffers", "gradients", "parameters"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in (found.settings.strategy, found.settings.against):
        table.add_column(Text(name), justify="right", overflow="fold")
    stride = -(-len(found.history) // MAX_ROWS)
    for entry in (*found.history[:-1:stride], found.history[-1]):
        cells = [_number(entry.get(key)) for key in ("loss", "buffer", "gradient", "parameter")]
        losses = [_number(entry.get(key), digits=6) for key in ("candidate_loss", "reference_loss")]
        table.add_row("start" if entry["step"] < 0 else str(entry["step"]), *cells, *losses)
    _say(console, "after each step: largest absolute differences, and the losses")
    console.print(table)


def _place(difference: Difference) -> str:
    index = f", at {list(difference.index)}" if difference.index else ""
    count = f" ({difference.differing} of {difference.numel} numbers differ)" if difference.numel > 1 else ""
    return f"{difference.where}{index}{count}"


def _numbers(difference: Difference, settings: Settings) -> str:
    if difference.note:
        return difference.note.replace("candidate", settings.strategy).replace("reference", settings.against)
    values = f"{_number(difference.candidate, 9)} under {settings.strategy}, {_number(difference.reference, 9)} under"
    sizes = f"absolute {_number(difference.absolute)}, relative {_number(difference.relative)}"
    return f"{values} {settings.against}: {sizes}"


def _number(value: Any, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}g}"
