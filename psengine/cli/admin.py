"""``psengine admin``: an operator's orders to running servers, over the port that workers use."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from psengine.cli.console import printable
from psengine.cli.status import ServerAddress, StatusSource, TimeoutS, open_sources
from psengine.environment.local_sockets import host_and_port, is_listening
from psengine.errors import PSEngineError, ServerRefusedError

EXIT_REFUSED = 1
POLL_S = 0.5
HELP = (
    "Tell running servers something: write a snapshot, end a worker's lease, forget a job, drain, shut down. All named"
    " servers are told."
)
EPILOG = (
    "Example: [bold]psengine admin snapshot --server-address tcp://127.0.0.1:7077[/bold]. Servers obey their own user"
    " on their machine, and a key of --admin-allow (PSENGINE_CLIENT_KEY, PSENGINE_SERVER_KEY). Exit code 0: done; 1:"
    " refused, or a server does not answer; 2: wrong arguments."
)

JobName = Annotated[
    str, typer.Option("--job", metavar="NAME", help="The job; its name is PSENGINE_JOB of its workers.")
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    admin = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", epilog=EPILOG, help=HELP)
    for command in (snapshot, evict, forget, drain, shutdown):
        admin.command()(command)
    app.add_typer(admin, name="admin")


def snapshot(address: ServerAddress = None, timeout_s: TimeoutS = 10.0) -> None:
    """Write a snapshot now, and wait for it up to six seconds."""
    _tell(_open(address, timeout_s), action="snapshot")


def evict(
    job: JobName,
    worker: Annotated[int, typer.Option("--worker", metavar="N", help="The worker's rank.", min=0)],
    address: ServerAddress = None,
    timeout_s: TimeoutS = 10.0,
) -> None:
    """End a worker's lease: the others go on without it. If its process lives, it comes back, or ends to join anew."""
    _tell(_open(address, timeout_s), action="evict", job=job, worker=worker)


def forget(job: JobName, address: ServerAddress = None, timeout_s: TimeoutS = 10.0) -> None:
    """Drop a job without workers: its values, also in the next snapshot. There is no way back."""
    _tell(_open(address, timeout_s), action="forget", job=job)


def drain(
    wait_s: Annotated[
        float, typer.Option("--wait-s", help="Wait so long for the servers' end; 0: do not wait.", min=0.0)
    ] = 0.0,
    address: ServerAddress = None,
    timeout_s: TimeoutS = 10.0,
) -> None:
    """Let no more workers in, and end each server, with a last snapshot, once its last worker has left."""
    servers = _open(address, timeout_s)
    _tell(servers, action="drain")
    deadline_s = time.monotonic() + wait_s
    for server in servers if wait_s else ():
        while not _has_ended(server.address):
            if time.monotonic() >= deadline_s:
                _say(f"{server.address}: still drains after {wait_s:g} s. Fix: end its workers, see psengine status")
                raise typer.Exit(EXIT_REFUSED)
            time.sleep(POLL_S)
        _say(f"{server.address}: has ended")


def shutdown(address: ServerAddress = None, timeout_s: TimeoutS = 10.0) -> None:
    """End the servers now, in order: with a last snapshot. Workers wait for a server to come back."""
    _tell(_open(address, timeout_s), action="shutdown")


def _open(address: str | None, timeout_s: float) -> list[StatusSource]:
    logging.getLogger("psengine").addHandler(logging.NullHandler())  # the answers say what is wrong
    return open_sources(address, timeout_s)


def _tell(servers: Sequence[StatusSource], **order: Any) -> None:
    """Give an order to every server, and show the answers; ends the command with 1 unless all is done."""
    from psengine.protocol.messages import ErrorCode

    failures = []
    for server in servers:
        try:
            (answer,) = server.connected().administer(order)
            _say(f"{server.address}: {answer.get('text', '')}")
        except PSEngineError as error:
            failures.append(error)
            _say(str(error))
        finally:
            server.close()
    # A worker, or a job, that one of the servers knows need not be at all of them; followers do not decide.
    known_codes = (ErrorCode.UNKNOWN_JOB, ErrorCode.NOT_LEADING)
    are_unknown = [isinstance(one, ServerRefusedError) and one.code in known_codes for one in failures]
    if failures and (len(failures) == len(servers) or not all(are_unknown)):
        raise typer.Exit(EXIT_REFUSED)


def _has_ended(address: str) -> bool:
    """Whether nobody listens there."""
    place = host_and_port(address)
    if place is None:
        return not is_listening(address)
    try:
        socket.create_connection(place, timeout=POLL_S).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def _say(text: str) -> None:
    print(printable(text), flush=True)
