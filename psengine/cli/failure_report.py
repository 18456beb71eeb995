"""The report at the end of a run that failed: the rank that was first, its traceback, how the others ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from psengine.cli.console import print_if_read
from psengine.cli.launching.failure import RankEnd

if TYPE_CHECKING:
    from psengine.cli.launching.run import Outcome


def speaker(console: Console, command: str = "psengine run") -> Callable[[str], None]:
    """A function that says a line in the launcher's name, from any thread, whether or not somebody reads stderr."""

    def say(line: str) -> None:
        print_if_read(console, Text(f"{command}: {line}"), soft_wrap=True)

    return say


def show_outcome(console: Console, outcome: Outcome, *, independent: bool, command: str = "psengine run") -> None:
    """Say who failed first, and what became of the others."""
    first = outcome.first
    if first is not None:
        _show_failure(console, first, () if independent else outcome.ends, command)
    if independent and outcome.ends:
        _show_fates(console, outcome.ends)
    if outcome.failure:
        speaker(console, command)(outcome.failure)


def _show_failure(console: Console, first: RankEnd, ends: Sequence[RankEnd], command: str) -> None:
    when = "" if first.failed_s is None else f", at {time.strftime('%H:%M:%S', time.localtime(first.failed_s))}"
    again = f", after {first.restarts} restarts" if first.restarts else ""
    headline = f"{first.name} failed first{when}{again}: {first.how}"
    print_if_read(console, Text(f"{command}: {headline}", style="bold red"), soft_wrap=True)
    for line in first.traceback or ("(it wrote nothing to stderr)",):
        print_if_read(console, Text(f"  {line}"), soft_wrap=True)
    others = [end for end in ends if end is not first]
    failed = [end for end in others if end.exit_code != 0 and not end.was_ended]
    lines = [_ranks("ended because of it", [end for end in others if end.was_ended])]
    for end in sorted(failed, key=lambda one: (one.failed_s or 0.0, one.rank)):
        words = f": {end.last_words}" if end.last_words else ""
        lines.append(f"failed after it: rank {end.rank}, {end.how}{words}")
    lines.append(_ranks("had finished", [end for end in others if end.exit_code == 0]))
    for line in filter(None, lines):
        print_if_read(console, Text(line), soft_wrap=True)


def _show_fates(console: Console, ends: Sequence[RankEnd]) -> None:
    """A table of how independent workers ended."""
    table = Table(title="workers", title_justify="left")
    for column in ("worker", "process", "restarts", "ended", "last words"):
        table.add_column(column)
    for end in ends:
        is_well = end.exit_code == 0
        fate = Text("in order", style="green") if is_well else Text(end.how, style="red")
        words = "" if is_well else end.last_words
        table.add_row(str(end.rank), str(end.pid), str(end.restarts), fate, Text(words))
    print_if_read(console, table)


def _ranks(fate: str, ends: Sequence[RankEnd]) -> str:
    ranks = ", ".join(str(end.rank) for end in ends)
    return f"{fate}: rank{'' if len(ends) == 1 else 's'} {ranks}" if ends else ""
