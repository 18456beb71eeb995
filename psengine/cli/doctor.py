"""``psengine doctor``: what is wrong with this machine, this installation and the way to the servers, and the fix."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from psengine.cli.console import open_console, printable
from psengine.cli.doctor_checks import exchange, machine, servers, software, variables
from psengine.cli.doctor_checks.findings import Check, CheckContext, Finding, Level, problem, started_with, warning
from psengine.errors import ConfigurationError
from psengine.parameter_server.client.addresses import parse_addresses

# In the order of the report.
CHECKS: dict[str, Check] = {
    "versions": software.versions,
    "installation": software.installed,
    "native-extension": software.native_extension,
    "cuda": software.cuda,
    "threads": machine.threads,
    "dev-shm": machine.dev_shm,
    "hostname": machine.hostname,
    "launcher": variables.launcher,
    "variables": variables.variables,
    "exchange": exchange.exchange,
    "servers": servers.servers,
}
CHECK_DEADLINE_S = 20.0
# Two interpreters start.
EXCHANGE_DEADLINE_S = 45.0
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
    for name, check in CHECKS.items():
        for finding in examine(name, check, context) if not only or name in only else ():
            found.append((name, finding))
            if not as_json:
                _show(console, name, finding)
    counts = {level.value: sum(finding.level is level for _, finding in found) for level in Level}
    if as_json:
        findings = [{"check": name, **asdict(finding), "level": finding.level.value} for name, finding in found]
        print(json.dumps({"findings": findings, "counts": counts}, default=str))
    else:
        listed = [
            f"{counts[level]} {level}{'s' if counts[level] != 1 else ''}" for level in ("problem", "warning", "note")
        ]
        console.print(Text(f"{', '.join(listed)}.", style="bold"))
    if counts["problem"]:
        raise typer.Exit(EXIT_PROBLEM)


def examine(name: str, check: Check, context: CheckContext) -> list[Finding]:
    """What a check finds; a check that fails, or does not end in time, is a finding too."""
    findings: list[Finding] = []

    def work() -> None:
        try:
            for finding in check(context):
                findings.append(finding)
        except Exception as error:
            text = f"this check itself failed: {type(error).__name__}: {error}"
            findings.append(warning(text, "report it, with the output of psengine doctor --json"))

    # A daemon thread: a check that hangs must not keep the command from ending.
    thread = threading.Thread(target=work, name=f"psengine-doctor-{name}", daemon=True)
    thread.start()
    limit_s = CHECK_DEADLINE_S
    if name == "exchange":
        limit_s = EXCHANGE_DEADLINE_S
    elif name == "servers":
        limit_s += len(context.servers) * (CHECK_DEADLINE_S + 4 * context.timeout_s)
    thread.join(limit_s)
    if not thread.is_alive():
        return findings
    fix = "something that it asks does not answer: name servers, the network, or a very busy machine"
    return [*findings, problem(f"this check had not ended after {limit_s:g} s", fix)]


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
