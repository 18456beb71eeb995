"""``psengine status``: workers, their progress, and the servers' load; once, or again and again."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from psengine.cli.console import open_console
from psengine.cli.status_overview import Overview, StatusSource, ask_all, open_sources
from psengine.cli.status_table import events_view, jobs_view, servers_table

EXIT_UNHEALTHY = 1
EVENT_LINES = 5
EPILOG = (
    "Examples: [bold]psengine status --server-address tcp://a:7077,tcp://b:7077[/bold] · [bold]psengine status"
    " --watch[/bold] · [bold]psengine status --json | jq .jobs.default.workers[/bold]"
)

ServerAddress = Annotated[
    str | None,
    typer.Option(
        "--server-address",
        metavar="ADDRESSES",
        help="tcp://host:port or ipc://path of servers, with commas; by default PSENGINE_SERVERS.",
    ),
]
TimeoutS = Annotated[float, typer.Option("--timeout-s", help="Deadline of one answer.", min=0.1, max=600.0)]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("status", epilog=EPILOG)(status)


def status(
    servers: ServerAddress = None,
    job: Annotated[str | None, typer.Option("--job", metavar="NAME", help="This job alone.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval-s", help="With --watch, seconds between two looks.", min=0.05, max=3600.0)
    ] = 1.0,
    timeout_s: TimeoutS = 5.0,
) -> None:
    """Show the state of servers and jobs: workers, steps, staleness, where the time goes, counters, events.

    Exit code 0: all is well; 130: Ctrl-C; 1: a server does not answer, a shard does not work, a worker is silent, a
    follower is not in sync, or there is no job of that name; 2: wrong arguments. CURVE keys come from
    PSENGINE_SERVER_KEY and PSENGINE_CLIENT_KEY.
    """
    if as_json and watch:
        raise typer.BadParameter("--json and --watch exclude each other", param_hint="status")
    # The client logs about servers that are away, which the status shows.
    logging.getLogger("psengine").addHandler(logging.NullHandler())
    sources = open_sources(servers, timeout_s)
    console = open_console()
    try:
        if watch:
            _watch(sources, job, interval_s, console)
            return
        view = _View(ask_all(sources, job), job)
    finally:
        for source in sources:
            source.close()
    if as_json:
        told = {"healthy": not view.problems, "problems": view.problems, **view.overview.to_json()}
        print(msgspec.json.encode(told).decode())
    else:
        console.print(view)
    if view.problems:
        raise typer.Exit(EXIT_UNHEALTHY)


def _watch(sources: Sequence[StatusSource], job: str | None, interval_s: float, console: Console) -> None:
    """Show the state until Ctrl-C: on a terminal's whole screen, elsewhere one below the other."""
    # SIGTERM raises an exception, which restores the terminal.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with Live(console=console, screen=console.is_terminal, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            view = _View(ask_all(sources, job), job)
            if console.is_terminal:
                live.update(view, refresh=True)
            else:
                console.print(view)
            time.sleep(interval_s)


class _View:
    """An overview, drawn as wide as the terminal is at that moment."""

    def __init__(self, overview: Overview, job: str | None) -> None:
        self.overview = overview
        # A job may be at a server that does not answer.
        is_missing = job is not None and job not in overview.jobs and not any(one.error for one in overview.reports)
        self.problems = overview.problems + ([f"there is no job {job!r} at these servers"] if is_missing else [])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Servers, jobs, events; what is wrong."""
        yield servers_table(self.overview.reports, options.max_width)
        yield Text()
        yield jobs_view(self.overview, options.max_width)
        if self.overview.events:
            yield Text("events", "dim")
            yield events_view(self.overview.events, EVENT_LINES)
        for text in self.overview.warnings:
            yield Text(text, "yellow")
        for text in self.problems:
            yield Text(text, "bold red")
