"""``psengine status`` and ``psengine top``: workers, their progress, and the servers' load."""

from __future__ import annotations

import json
import logging
import signal
import sys
from types import FrameType
from typing import Annotated

import typer
from rich.console import Group
from rich.text import Text

from psengine.cli.console import open_console
from psengine.cli.status_overview import Overview
from psengine.cli.status_sources import ask_all, open_sources
from psengine.cli.status_table import events_view, jobs_view, servers_table
from psengine.cli.top import Watch, show_frames, show_live

EXIT_UNHEALTHY = 1
EVENT_LINES = 5
STATUS_EPILOG = (
    "Examples: [bold]psengine status --server-address tcp://a:7077,tcp://b:7077[/bold] · [bold]psengine status"
    " --server-address http://127.0.0.1:9100[/bold] (a --status-port) · [bold]psengine status --json | jq"
    " .jobs.default.workers[/bold]"
)
TOP_EPILOG = (
    "Examples: [bold]psengine top --server-address tcp://a:7077[/bold] · [bold]ssh -L 9100:127.0.0.1:9100 a[/bold],"
    " then [bold]psengine top --server-address http://127.0.0.1:9100[/bold], which shows the event log too"
)

Servers = Annotated[
    str | None,
    typer.Option(
        "--server-address",
        metavar="ADDRESSES",
        help="tcp://host:port,... of psengine-servers, or http://... of a status port; by default PSENGINE_SERVERS.",
    ),
]
JobName = Annotated[str | None, typer.Option("--job", metavar="NAME", help="This job alone.")]
TimeoutS = Annotated[float, typer.Option("--timeout-s", help="Deadline of one answer.", min=0.1, max=600.0)]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("status", epilog=STATUS_EPILOG)(status)
    app.command("top", epilog=TOP_EPILOG)(top)


def status(
    servers: Servers = None,
    job: JobName = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    timeout_s: TimeoutS = 5.0,
) -> None:
    """Show the state of servers and jobs once: workers, steps, staleness, where the time goes, counters.

    Exit code 0: all is well; 1: a server does not answer, a shard does not work, a worker is silent, or there is no
    job of that name; 2: wrong arguments. CURVE keys come from PSENGINE_SERVER_KEY and PSENGINE_CLIENT_KEY.
    """
    _keep_the_log_quiet()
    sources = open_sources(servers, timeout_s)
    try:
        overview = ask_all(sources, job)
    finally:
        for source in sources:
            source.close()
    problems = _problems(overview, job)
    if as_json:
        print(json.dumps({**overview.to_json(), "healthy": not problems, "problems": problems}))
    else:
        console = open_console()
        events = [Text("events", "dim"), events_view(overview.events, EVENT_LINES)] if overview.events else []
        tables = jobs_view(overview, console.width, console.options.ascii_only)
        console.print(Group(servers_table(overview.reports, console.width), Text(), tables, *events))
        for text in overview.warnings:
            console.print(Text(text, "yellow"), soft_wrap=True)
        for text in problems:
            console.print(Text(text, "bold red"), soft_wrap=True)
    if problems:
        raise typer.Exit(EXIT_UNHEALTHY)


def top(
    servers: Servers = None,
    job: JobName = None,
    interval_s: Annotated[
        float, typer.Option("--interval-s", help="Seconds between an answer and the next query.", min=0.05, max=3600.0)
    ] = 1.0,
    timeout_s: TimeoutS = 5.0,
    once: Annotated[bool, typer.Option("--once", help="One frame, then end; works without a terminal.")] = False,
    iterations: Annotated[
        int | None, typer.Option("--iterations", metavar="N", help="End after N frames.", min=1)
    ] = None,
) -> None:
    """Show the state of servers and jobs live; q or Ctrl-C ends it. top waits for a server that goes away.

    Exit codes: 0; 1: with --once or --iterations, a server did not answer at the end; 2: wrong arguments.
    """
    _keep_the_log_quiet()
    frames = 1 if once else iterations
    console = open_console()
    if frames is None and not console.is_terminal:
        raise typer.BadParameter(
            "the live view needs a terminal (expected one on stdout, got none). Fix: psengine status, or --once",
            param_hint="top",
        )
    sources = open_sources(servers, timeout_s)
    # SIGTERM raises an exception, which restores the terminal.
    signal.signal(signal.SIGTERM, _end)
    try:
        with Watch(sources, interval_s, job) as watch:
            if frames is not None and not console.is_terminal:
                patience_s = interval_s + 4 * timeout_s
                problems = _problems(show_frames(watch, console, frames, patience_s), job)
            else:
                show_live(watch, console, frames)
                problems = [] if frames is None else _problems(watch.look().overview, job)
                if frames is not None:
                    console.print(watch.look())
    except KeyboardInterrupt:
        return
    if problems:
        raise typer.Exit(EXIT_UNHEALTHY)


def _problems(overview: Overview, job: str | None) -> list[str]:
    # A job may be at a shard that does not answer.
    missing = job is not None and job not in overview.jobs and overview.is_complete
    return [*overview.problems, *([f"there is no job {job!r} at these servers"] if missing else [])]


def _keep_the_log_quiet() -> None:
    """Drop the client's log lines about servers that are away: these commands show them."""
    logging.getLogger("psengine").addHandler(logging.NullHandler())


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
