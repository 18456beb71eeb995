"""``psengine doctor``: what is wrong with this machine, this installation and the way to the servers, and the fix."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from psengine.cli.console import open_console, printable
from psengine.cli.doctor_checks import collectives, host, naming, processor, servers, software, variables
from psengine.cli.doctor_checks.findings import Check, Circumstances, Finding, Level, problem, started_with, warning
from psengine.parameter_server.client.addresses import parse_addresses

# In the order of the report.
CHECKS: dict[str, Check] = {
    "versions": software.versions,
    "installation": software.installed,
    "packages": software.packages,
    "native-extension": software.native_extension,
    "cuda": software.cuda,
    "backends": collectives.backends,
    "cores": processor.cores,
    "threads": processor.threads,
    "memory": processor.memory,
    "dev-shm": host.dev_shm,
    "memory-sharing": host.memory_sharing,
    "limits": host.limits,
    "clock": host.clock,
    "hostname": naming.hostname,
    "interfaces": naming.interfaces,
    "launcher": variables.launcher,
    "variables": variables.variables,
    "exchange": collectives.exchange,
    "servers": servers.servers,
}
CHECK_DEADLINE_S = 20.0
# Beyond the others' deadline: two interpreters start.
EXCHANGE_DEADLINE_S = 45.0
EXIT_PROBLEM = 1
STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}
EPILOG = (
    "Examples: [bold]psengine doctor[/bold] · [bold]psengine doctor --servers tcp://a:7077,tcp://b:7077 --model-mb"
    " 100[/bold] · [bold]psengine doctor --only hostname --only interfaces --json[/bold]"
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor", epilog=EPILOG)(doctor)


def doctor(
    servers: Annotated[
        str | None,
        typer.Option(
            "--servers", metavar="ADDRESSES", help="tcp://host:port,... to try; by default those of PSENGINE_SERVERS."
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="CHECK", help=f"Just this check; may be repeated. One of {', '.join(CHECKS)}."),
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
    """Look for what keeps training from working, or from being fast: versions, native code, GPUs, cores, memory,
    limits, names, variables, a trial all-reduce, and the way to each server. Every finding comes with its fix.

    Exit code 0: no problem (there may be warnings); 1: at least one; 2: wrong arguments.
    """
    names = _selected(only)
    given = started_with()
    circumstances = Circumstances(
        variables=given,
        servers=_named_servers(servers),
        model_bytes=None if model_mb is None else int(model_mb * 1e6),
        timeout_s=timeout_s,
    )
    # What libraries log about a dead server is in the findings.
    logging.getLogger("psengine").addHandler(logging.NullHandler())
    console = open_console()
    found: list[tuple[str, Finding]] = []
    for name in names:
        for finding in examine(name, CHECKS[name], circumstances):
            found.append((name, finding))
            if not as_json:
                _show(console, name, finding)
    counts = {level.value: sum(finding.level is level for _, finding in found) for level in Level}
    if as_json:
        print(json.dumps({"findings": [_to_json(*entry) for entry in found], "counts": counts}, default=str))
    else:
        console.print(Text(_summary(counts), style="bold"))
    if counts["problem"]:
        raise typer.Exit(EXIT_PROBLEM)


def examine(name: str, check: Check, circumstances: Circumstances) -> Iterator[Finding]:
    """What a check finds, as it finds it; that it failed, or did not end in time, is a finding too."""
    findings: queue.SimpleQueue[Finding | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            for finding in check(circumstances):
                findings.put(finding)
        except Exception as error:
            findings.put(
                warning(
                    f"this check itself failed: {type(error).__name__}: {error}",
                    "report it, with the output of psengine doctor --json",
                )
            )
        finally:
            findings.put(None)

    # A daemon: what hangs must not keep the command from ending.
    threading.Thread(target=work, name=f"psengine-doctor-{name}", daemon=True).start()
    limit_s = _deadline_of(name, circumstances)
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            finding = findings.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            yield problem(
                f"this check had not ended after {limit_s:g} s",
                "something it asks does not answer: name servers, the network, or a very busy machine",
            )
            return
        if finding is None:
            return
        yield finding


def _deadline_of(name: str, circumstances: Circumstances) -> float:
    if name == "exchange":
        return EXCHANGE_DEADLINE_S + circumstances.timeout_s
    if name == "servers":
        return CHECK_DEADLINE_S + len(circumstances.servers) * (CHECK_DEADLINE_S + 4 * circumstances.timeout_s)
    return CHECK_DEADLINE_S


def _selected(only: Sequence[str] | None) -> list[str]:
    for name in only or ():
        if name not in CHECKS:
            raise typer.BadParameter(
                f"there is no check {name!r} (expected one of {', '.join(CHECKS)})", param_hint="--only"
            )
    return [name for name in CHECKS if not only or name in only]


def _named_servers(servers: str | None) -> tuple[str, ...]:
    """Addresses to try. One in the environment that cannot be read is the finding of another check."""
    from psengine.errors import ConfigurationError

    try:
        return parse_addresses(servers)
    except ConfigurationError:
        if servers is not None:
            raise
        return ()


def _show(console: Console, name: str, finding: Finding) -> None:
    # What a server calls itself is among the texts.
    lines = [Text(printable(finding.text))]
    if finding.fix:
        lines.append(Text.assemble(("fix: ", "bold"), printable(finding.fix)))
    for position, line in enumerate(lines):
        level = Text(f"{'' if position else finding.level.value:<8}", STYLES[finding.level])
        label = Text(f"{'' if position else name:<17}", "dim")
        if console.is_terminal:
            row = Table.grid()
            row.add_row(level, label, line)
            console.print(row)
        else:
            console.print(Text.assemble(level, label, line))


def _summary(counts: Mapping[str, int]) -> str:
    listed = [f"{counts[level]} {level}{'s' if counts[level] != 1 else ''}" for level in ("problem", "warning", "note")]
    return f"{', '.join(listed)}."


def _to_json(name: str, finding: Finding) -> dict[str, Any]:
    return {"check": name, **asdict(finding), "level": finding.level.value}
