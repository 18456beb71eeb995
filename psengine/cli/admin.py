"""``psengine admin``: what an operator tells running servers, at their status ports."""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from psengine.cli.console import printable
from psengine.cli.status_http import NobodyListensError, NoHttpError, StatusHttp, trusted_ca
from psengine.environment.variables import read_variable
from psengine.errors import ConfigurationError
from psengine.protocol.keys import read_token

EXIT_REFUSED = 1
POLL_S = 0.5
HELP = (
    "Tell running servers something: write a snapshot, end a worker's lease, forget a job, drain, shut down. All named"
    " servers are told."
)
EPILOG = (
    "Example: [bold]psengine admin snapshot --server-address http://127.0.0.1:9100 --token token[/bold]. The server"
    " needs --status-port and --status-token. Exit code 0: done; 1: refused, or a server does not answer; 2: wrong"
    " arguments."
)

Address = Annotated[
    str | None,
    typer.Option(
        "--server-address",
        metavar="ADDRESSES",
        help="http://host:port or https://... of servers' status ports, with commas; by default PSENGINE_SERVERS.",
    ),
]
Token = Annotated[
    Path | None,
    typer.Option("--token", metavar="FILE", help="The servers' --status-token file; by default PSENGINE_STATUS_TOKEN."),
]
Ca = Annotated[
    Path | None,
    typer.Option("--ca", metavar="FILE", help="Certificates to trust, in PEM; by default PSENGINE_STATUS_CA."),
]
TimeoutS = Annotated[float, typer.Option("--timeout-s", help="Deadline of one answer.", min=0.1, max=600.0)]
JobName = Annotated[
    str, typer.Option("--job", metavar="NAME", help="The job; its name is PSENGINE_JOB of its workers.")
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    admin = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", epilog=EPILOG, help=HELP)
    for command in (snapshot, evict, forget, drain, shutdown):
        admin.command()(command)
    app.add_typer(admin, name="admin")


def snapshot(address: Address = None, token: Token = None, ca: Ca = None, timeout_s: TimeoutS = 10.0) -> None:
    """Write a snapshot now, and wait for it up to six seconds."""
    _tell(_ports(address, token, ca, timeout_s), "snapshot")


def evict(
    job: JobName,
    worker: Annotated[int, typer.Option("--worker", metavar="N", help="The worker's rank.", min=0)],
    address: Address = None,
    token: Token = None,
    ca: Ca = None,
    timeout_s: TimeoutS = 10.0,
) -> None:
    """End a worker's lease: the others go on without it. If its process lives, it comes back."""
    _tell(_ports(address, token, ca, timeout_s), "evict", job=job, worker=str(worker))


def forget(
    job: JobName, address: Address = None, token: Token = None, ca: Ca = None, timeout_s: TimeoutS = 10.0
) -> None:
    """Drop a job without workers: its values, also in the next snapshot. There is no way back."""
    _tell(_ports(address, token, ca, timeout_s), "forget", job=job)


def drain(
    wait_s: Annotated[
        float, typer.Option("--wait-s", help="Wait so long for the servers' end; 0: do not wait.", min=0.0)
    ] = 0.0,
    address: Address = None,
    token: Token = None,
    ca: Ca = None,
    timeout_s: TimeoutS = 10.0,
) -> None:
    """Let no more workers in, and end each server, with a last snapshot, once its last worker has left."""
    ports = _ports(address, token, ca, timeout_s)
    _tell(ports, "drain")
    deadline_s = time.monotonic() + wait_s
    said: dict[str, str] = {}
    while wait_s and ports:
        remaining = []
        for port in ports:
            try:
                workers = _workers_of(port)
            except NobodyListensError:
                _say(port, "has ended")
                continue
            except (OSError, ValueError, LookupError, TypeError) as error:
                workers = f"an answer ({error})"
            remaining.append(port)
            if said.get(port.url) != workers:
                said[port.url] = workers
                _say(port, f"waits for {workers or 'nobody'}")
        ports = remaining
        if ports and time.monotonic() >= deadline_s:
            for port in ports:
                _say(port, f"still drains after {wait_s:g} s. Fix: end its workers, or psengine admin shutdown")
            raise typer.Exit(EXIT_REFUSED)
        if ports:
            time.sleep(min(POLL_S, max(0.0, deadline_s - time.monotonic())))


def shutdown(address: Address = None, token: Token = None, ca: Ca = None, timeout_s: TimeoutS = 10.0) -> None:
    """End the servers now, in order: with a last snapshot. Workers wait for a server to come back."""
    _tell(_ports(address, token, ca, timeout_s), "shutdown")


def _ports(address: str | None, token: Path | None, ca: Path | None, timeout_s: float) -> list[StatusHttp]:
    """The status ports of an argument, else of PSENGINE_SERVERS.

    Raises:
        ConfigurationError: none is named, or one is no status port's; no token is named, or it cannot be read.
    """
    text = address if address is not None else read_variable("PSENGINE_SERVERS") or ""
    urls = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
        raise ConfigurationError(
            f"servers are told at their status ports (expected --server-address http://HOST:PORT or https://..., got"
            f" {text or 'nothing'}). Fix: start them with --status-port and --status-token; they say at"
            " their start 'status at ADDRESS'"
        )
    named = token or read_variable("PSENGINE_STATUS_TOKEN")
    if not named:
        raise ConfigurationError(
            "servers obey those who have their token (expected --token FILE or PSENGINE_STATUS_TOKEN, got neither)."
            " Fix: name the file that the server's --status-token names, or a copy of mode 0600"
        )
    word = read_token(named)
    return [StatusHttp(url, timeout_s, token=word, ca=ca or trusted_ca()) for url in urls]


def _tell(ports: Sequence[StatusHttp], action: str, **parameters: str) -> None:
    """Perform an action at every server, and show the answers; ends the command with 1 unless all is done."""
    query = f"?{urlencode(parameters)}" if parameters else ""
    codes = []
    for port in ports:
        try:
            code, _, content = port.ask(f"/actions/{action}{query}", "POST")
        except (OSError, NoHttpError) as error:
            codes.append(0)
            _say(port, f"did not answer: {error}")
            continue
        codes.append(code)
        _say(port, _text_of(code, content) + (_suggestion(port, parameters) if code == 404 else ""))
    are_done = [200 <= code < 300 for code in codes]
    # A worker, or a job, that one of the servers knows need not be at all of them.
    if not all(is_done or (code == 404 and any(are_done)) for code, is_done in zip(codes, are_done, strict=True)):
        raise typer.Exit(EXIT_REFUSED)


def _text_of(code: int, content: bytes) -> str:
    try:
        said = json.loads(content)
        return str(said.get("error") or said["text"])
    except (ValueError, KeyError, AttributeError):
        text = content[:200].decode(errors="replace").strip()
        return f"{code}, {text or 'without a text'}. Is it a psengine-server's status port?"


def _suggestion(port: StatusHttp, parameters: Mapping[str, str]) -> str:
    """What there is at a server instead of what was not found."""
    try:
        jobs = _jobs_of(port)
    except (OSError, ValueError):
        return ""
    name = parameters.get("job", "")
    if name in jobs:
        ranks = [str(worker["rank"]) for worker in jobs[name]["workers"]]
        return f" Its workers: {', '.join(ranks) or 'none'}."
    close = difflib.get_close_matches(name, jobs, n=1)
    return f" Did you mean {close[0]!r}?" if close else f" Its jobs: {', '.join(map(repr, jobs)) or 'none'}."


def _jobs_of(port: StatusHttp) -> dict[str, Any]:
    """A server's jobs by name.

    Raises:
        OSError, ValueError: it does not say.
    """
    page = json.loads(port.ask("/status.json")[2])
    jobs = page.get("jobs") if isinstance(page, dict) else None
    if not isinstance(jobs, dict):
        raise ValueError("no status came back")
    return jobs


def _workers_of(port: StatusHttp) -> str:
    """The workers that a server has, in words; raises as ``_jobs_of``."""
    found = [
        f"worker {worker['rank']} of job {name!r} (process {worker['pid']} on {worker['host']})"
        for name, job in _jobs_of(port).items()
        for worker in job["workers"]
    ]
    return ", ".join(found)


def _say(port: StatusHttp, text: str) -> None:
    print(printable(f"{port.url}: {text}"), flush=True)
