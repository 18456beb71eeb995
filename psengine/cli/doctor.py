"""``psengine doctor``: what is wrong with this machine, this installation and the way to the servers, and the fix."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from psengine.cli.console import open_console, printable
from psengine.environment.variables import inherited_variables

if TYPE_CHECKING:
    from psengine.cli.doctor_checks import Finding

EXIT_PROBLEM = 1
STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}
# In the order of the report. Each is a function of doctor_checks.
CHECKS = (
    *("versions", "native-extension", "cuda", "threads", "dev-shm", "hostname"),
    *("launcher", "variables", "exchange", "servers"),
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


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
    from psengine.cli.doctor_checks import CheckContext, examine

    context = CheckContext(variables=inherited_variables(), servers=servers, timeout_s=timeout_s)
    # The findings say what the client logs about a dead server.
    logging.getLogger("psengine").addHandler(logging.NullHandler())
    console = open_console()
    counts = dict.fromkeys(STYLES, 0)
    report = []
    for name in only or CHECKS:
        for finding in examine(name, context):
            counts[finding.level] += 1
            report.append({"check": name, **asdict(finding)})
            if not as_json:
                _show(console, name, finding)
    if as_json:
        print(json.dumps({"findings": report, "counts": counts}))
    else:
        console.print(", ".join(f"{counts[level]} {level}s" for level in ("problem", "warning", "note")), style="bold")
    if counts["problem"]:
        raise typer.Exit(EXIT_PROBLEM)


def _show(console: Console, name: str, finding: Finding) -> None:
    # Texts may hold names that a server sent.
    level, label = Text(f"{finding.level:<8}", STYLES[finding.level]), Text(f"{name:<17}", "dim")
    console.print(Text.assemble(level, label, printable(finding.text)), soft_wrap=True)
    if finding.fix:
        console.print(Text.assemble(" " * 25, ("fix: ", "bold"), printable(finding.fix)), soft_wrap=True)
