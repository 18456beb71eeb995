"""``psengine admin``: an operator's orders to running servers, over the port that workers use."""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from psengine.cli.console import printable
from psengine.environment.local_sockets import is_listening
from psengine.environment.variables import read_variable
from psengine.errors import ConfigurationError, PSEngineError, ServerRefusedError
from psengine.parameter_server.client.addresses import keys_from_environment, parse_addresses
from psengine.protocol.keys import CurveClientKeys
from psengine.protocol.messages import ErrorCode

if TYPE_CHECKING:
    from psengine.parameter_server.client.client import Client

EXIT_REFUSED = 1
POLL_S = 0.5
HELP = (
    "Tell running servers something: write a snapshot, end a worker's lease, forget a job, drain, shut down. All named"
    " servers are told."
)
EPILOG = (
    "Example: [bold]psengine admin snapshot --server-address tcp://127.0.0.1:7077[/bold]. Servers obey their own user"
    " on their machine, a key of --admin-allow (PSENGINE_CLIENT_KEY, PSENGINE_SERVER_KEY), and those who have the"
    " secret of --admin-secret-file. Exit code 0: done; 1: refused, or a server does not answer; 2: wrong arguments."
)

Address = Annotated[
    str | None,
    typer.Option(
        "--server-address",
        metavar="ADDRESSES",
        help="tcp://host:port or ipc://path of servers, with commas; by default PSENGINE_SERVERS.",
    ),
]
Secret = Annotated[
    Path | None,
    typer.Option(
        "--admin-secret-file",
        metavar="FILE",
        help="The operators' secret, beside PSENGINE_SECRET_FILE; by default PSENGINE_ADMIN_SECRET_FILE.",
    ),
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


def snapshot(address: Address = None, secret: Secret = None, timeout_s: TimeoutS = 10.0) -> None:
    """Write a snapshot now, and wait for it up to six seconds."""
    _Servers(address, secret, timeout_s).tell(action="snapshot")


def evict(
    job: JobName,
    worker: Annotated[int, typer.Option("--worker", metavar="N", help="The worker's rank.", min=0)],
    address: Address = None,
    secret: Secret = None,
    timeout_s: TimeoutS = 10.0,
) -> None:
    """End a worker's lease: the others go on without it. If its process lives, it comes back."""
    _Servers(address, secret, timeout_s).tell(action="evict", job=job, worker=worker)


def forget(job: JobName, address: Address = None, secret: Secret = None, timeout_s: TimeoutS = 10.0) -> None:
    """Drop a job without workers: its values, also in the next snapshot. There is no way back."""
    _Servers(address, secret, timeout_s).tell(action="forget", job=job)


def drain(
    wait_s: Annotated[
        float, typer.Option("--wait-s", help="Wait so long for the servers' end; 0: do not wait.", min=0.0)
    ] = 0.0,
    address: Address = None,
    secret: Secret = None,
    timeout_s: TimeoutS = 10.0,
) -> None:
    """Let no more workers in, and end each server, with a last snapshot, once its last worker has left."""
    servers = _Servers(address, secret, timeout_s)
    servers.tell(action="drain")
    deadline_s = time.monotonic() + wait_s
    for one in servers.addresses if wait_s else ():
        said = ""
        while not _has_ended(one):
            workers = servers.workers_of(one)
            if workers != said:
                _say(one, f"waits for {workers}")
                said = workers
            if time.monotonic() >= deadline_s:
                _say(one, f"still drains after {wait_s:g} s. Fix: end its workers, or psengine admin shutdown")
                raise typer.Exit(EXIT_REFUSED)
            time.sleep(POLL_S)
        _say(one, "has ended")


def shutdown(address: Address = None, secret: Secret = None, timeout_s: TimeoutS = 10.0) -> None:
    """End the servers now, in order: with a last snapshot. Workers wait for a server to come back."""
    _Servers(address, secret, timeout_s).tell(action="shutdown")


class _Servers:
    """The servers of an argument, else of PSENGINE_SERVERS.

    Raises:
        ConfigurationError: none is named, an address is malformed, or a key or a secret cannot be read.
    """

    def __init__(self, address: str | None, secret: Path | None, timeout_s: float) -> None:
        logging.getLogger("psengine").addHandler(logging.NullHandler())  # the answers say what is wrong
        self.addresses = list(dict.fromkeys(parse_addresses(address)))
        if not self.addresses:
            raise ConfigurationError(
                "no server is named (expected tcp://host:port; got none). Fix: --server-address tcp://127.0.0.1:7077,"
                " or set PSENGINE_SERVERS"
            )
        self._keys = _operator_keys(secret)
        self._timeout_s = timeout_s

    def connect(self, address: str) -> Client:
        """A client of one server. Raises PSEngineError where it does not answer, or does not let us in."""
        from psengine.parameter_server.client.client import connect

        wait_s = self._timeout_s
        return connect(address, role="reader", timeout_s=wait_s, connect_timeout_s=wait_s, keys=self._keys)

    def tell(self, **order: Any) -> None:
        """Give an order to every server, and show the answers; ends the command with 1 unless all is done."""
        failures = []
        is_done = False
        for address in self.addresses:
            try:
                with self.connect(address) as client:
                    _say(address, self._order(client, order))
                is_done = True
            except PSEngineError as error:
                failures.append(error)
                _say("", str(error))
        # A worker, or a job, that one of the servers knows need not be at all of them.
        if failures and not (is_done and all(_is_unknown(error) for error in failures)):
            raise typer.Exit(EXIT_REFUSED)

    def _order(self, client: Client, order: dict[str, Any]) -> str:
        try:
            return client.session.administer(order)[0]
        except ServerRefusedError as error:
            if not _is_unknown(error):
                raise
            workers = _workers(client)
            known = workers.get(order["job"])
            found = f"its workers: {known or 'none'}" if known is not None else f"its jobs: {list(workers) or 'none'}"
            raise ServerRefusedError(f"{error}; {found}", error.code) from None

    def workers_of(self, address: str) -> str:
        """The workers that a server has, in words."""
        try:
            with self.connect(address) as client:
                found = [f"worker {rank} of job {job!r}" for job, ranks in _workers(client).items() for rank in ranks]
        except PSEngineError as error:
            return f"an answer ({error})"
        return ", ".join(found) or "nobody"


def _operator_keys(secret: Path | None) -> CurveClientKeys | None:
    named = secret or read_variable("PSENGINE_ADMIN_SECRET_FILE")
    if not named:
        return keys_from_environment()
    shared = read_variable("PSENGINE_SECRET_FILE")
    if not shared:
        raise ConfigurationError(
            f"the operators' secret is the second one (expected PSENGINE_SECRET_FILE beside {named}, got none). Fix:"
            " set PSENGINE_SECRET_FILE to a copy of the secret that the server shares with its workers"
        )
    from psengine.parameter_server.shared_secret import operator_keys

    return operator_keys(named, shared)


def _workers(client: Client) -> dict[str, list[int]]:
    """By job the ranks of its workers, of a server's first shard."""
    jobs = client.status()[0]["jobs"]
    return {name: [worker["rank"] for worker in job["workers"]] for name, job in jobs.items()}


def _is_unknown(error: PSEngineError) -> bool:
    return isinstance(error, ServerRefusedError) and error.code == ErrorCode.UNKNOWN_JOB


def _has_ended(address: str) -> bool:
    """Whether nobody listens there."""
    if address.startswith("ipc://"):
        return not is_listening(address)
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=POLL_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _say(address: str, text: str) -> None:
    print(printable(f"{address}: {text}" if address else text), flush=True)
