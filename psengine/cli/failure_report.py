"""What ``psengine run`` says at the end of a run that failed: who was first, its traceback, who else ended and why."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from psengine.cli.console import print_if_read
from psengine.cli.launching.failure import RankEnd, describe_exit

if TYPE_CHECKING:
    from psengine.cli.launching.run import Outcome


def speaker(console: Console, command: str = "psengine run") -> Callable[[str], None]:
    """What says a line in the launcher's name, from any thread; never raises because nobody reads it."""

    def say(line: str) -> None:
        print_if_read(console, Text(f"{command}: {line}"), soft_wrap=True)

    return say


def show_outcome(console: Console, outcome: Outcome, *, independent: bool, command: str = "psengine run") -> None:
    """Say who failed first, and what became of the others."""
    first = outcome.first
    if first is not None:
        show_failure(console, first, () if independent else outcome.ends, command)
    if independent and outcome.ends:
        show_fates(console, outcome.ends)
    if outcome.failure:
        speaker(console, command)(outcome.failure)


def show_failure(console: Console, first: RankEnd, ends: Sequence[RankEnd], command: str = "psengine run") -> None:
    """Show which rank failed first, what it said, and what became of the others."""
    when = "" if first.failed_s is None else f", at {time.strftime('%H:%M:%S', time.localtime(first.failed_s))}"
    again = f", after {first.restarts} restarts" if first.restarts else ""
    headline = f"{first.name} failed first{when}{again}: {describe_exit(first.exit_code)}"
    lines = first.traceback or ("(it wrote nothing to stderr)",)
    print_if_read(console, Text(f"{command}: {headline}", style="bold red"), soft_wrap=True)
    for line in (*(f"  {line}" for line in lines), *_others(first, ends)):
        print_if_read(console, Text(line), soft_wrap=True)


def show_fates(console: Console, ends: Sequence[RankEnd]) -> None:
    """A table of how independent workers ended."""
    table = Table(title="workers", title_justify="left")
    for column in ("worker", "process", "restarts", "ended", "last words"):
        table.add_column(column)
    for end in ends:
        words = "" if end.exit_code == 0 else next((line for line in reversed(end.traceback) if line.strip()), "")
        style = "green" if end.exit_code == 0 else "red"
        fate = "in order" if end.exit_code == 0 else describe_exit(end.exit_code)
        table.add_row(str(end.rank), str(end.pid), str(end.restarts), Text(fate, style=style), Text(words.strip()))
    print_if_read(console, table)


def _others(first: RankEnd, ends: Sequence[RankEnd]) -> list[str]:
    ended = [end for end in ends if end.was_ended and end is not first]
    failed = [end for end in ends if end.exit_code != 0 and not end.was_ended and end is not first]
    finished = [end for end in ends if end.exit_code == 0]
    lines = []
    if ended:
        lines.append(f"ended because of it: {_ranks(ended)}")
    for end in sorted(failed, key=lambda one: (one.failed_s or 0.0, one.rank)):
        words = next((line.strip() for line in reversed(end.traceback) if line.strip()), "")
        lines.append(
            f"failed after it: rank {end.rank}, {describe_exit(end.exit_code)}" + (f": {words}" if words else "")
        )
    if finished:
        lines.append(f"had finished: {_ranks(finished)}")
    return lines


def _ranks(ends: Sequence[RankEnd]) -> str:
    return ("rank " if len(ends) == 1 else "ranks ") + ", ".join(str(end.rank) for end in ends)
