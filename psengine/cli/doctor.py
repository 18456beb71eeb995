"""``psengine doctor``: what is wrong with this machine, this installation and the way to the servers, and the fix."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from psengine.cli.console import open_console, printable
from psengine.cli.doctor_checks.findings import CheckContext, Finding, Level, started_with
from psengine.cli.doctor_checks.report import CHECKS, count_levels, examine, load_checks, summary
from psengine.errors import ConfigurationError
from psengine.parameter_server.client.addresses import parse_addresses

EXIT_PROBLEM = 1
STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}
EPILOG = (
    "Examples: [bold]psengine doctor[/bold] · [bold]psengine doctor --server-address tcp://a:7077,tcp://b:7077"
    " --model-mb 100[/bold] · [bold]psengine doctor --only hostname --only exchange --json[/bold]"
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor", epilog=EPILOG)(doctor)


def doctor(
    servers: Annotated[
        str | None,
        typer.Option(
            "--server-address",
            metavar="ADDRESSES",
            help="tcp://host:port,... to try; by default those of PSENGINE_SERVERS.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="CHECK", help=f"Only this check; may be repeated. One of {', '.join(CHECKS)}."),
    ] = None,
    model_mb: Annotated[
        float | None,
        typer.Option("--model-mb", help="Size of your parameters in MB: says what a step's exchange costs.", min=0.0),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", help="Deadline of one answer of a server.", min=0.1, max=600.0)
    ] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Check what breaks or slows training on this machine: versions, native code, GPUs, threads, host names,
    variables, a trial all-reduce, and the connection to each server. Every finding comes with its fix.

    Exit code 0: no problem (there may be warnings); 1: at least one; 2: wrong arguments.
    """
    for name in only or ():
        if name not in CHECKS:
            raise typer.BadParameter(f"there is no check {name!r} (expected one of {', '.join(CHECKS)})")
    context = CheckContext(
        variables=started_with(),
        servers=_named_servers(servers),
        model_bytes=None if model_mb is None else int(model_mb * 1e6),
        timeout_s=timeout_s,
    )
    # The findings say what the client logs about a dead server.
    logging.getLogger("psengine").addHandler(logging.NullHandler())
    console = open_console()
    found: list[tuple[str, Finding]] = []
    for name, check in load_checks().items():
        for finding in examine(name, check, context) if not only or name in only else ():
            found.append((name, finding))
            if not as_json:
                _show(console, name, finding)
    counts = count_levels(finding for _, finding in found)
    if as_json:
        findings = [{"check": name, **asdict(finding), "level": finding.level.value} for name, finding in found]
        print(json.dumps({"findings": findings, "counts": counts}, default=str))
    else:
        console.print(Text(summary(counts), style="bold"))
    if counts["problem"]:
        raise typer.Exit(EXIT_PROBLEM)


def _named_servers(servers: str | None) -> tuple[str, ...]:
    """Addresses to try. A malformed PSENGINE_SERVERS is a finding of the check ``variables``."""
    try:
        return parse_addresses(servers)
    except ConfigurationError:
        if servers is not None:
            raise
        return ()


def _show(console: Console, name: str, finding: Finding) -> None:
    # Texts may hold names that a server sent.
    level, label = Text(f"{finding.level.value:<8}", STYLES[finding.level]), Text(f"{name:<17}", "dim")
    rows = [(level, label, Text(printable(finding.text)))]
    if finding.fix:
        fix = Text.assemble(("fix: ", "bold"), printable(finding.fix))
        rows.append((Text(" " * 8), Text(" " * 17), fix))
    for row in rows:
        if console.is_terminal:
            grid = Table.grid()
            grid.add_row(*row)
            console.print(grid)
        else:
            console.print(Text.assemble(*row))
