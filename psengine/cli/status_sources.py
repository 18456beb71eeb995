"""Servers that can be asked for their status, over ZeroMQ or HTTP. A server that does not answer is a report too.

tcp://a:7077, ipc:///run/b      a reader's STATUS; works before any job exists, and for every kind of job
http://127.0.0.1:9100           /status.json of --status-port: has the event log too
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias

from psengine.cli.console import printable
from psengine.cli.status_http import MAX_REASON_CHARACTERS, NoHttpError, StatusHttp, reading_token, trusted_ca
from psengine.cli.status_overview import Overview, ServerReport, merge
from psengine.cli.status_reading import NoStatusError, read_status
from psengine.environment.variables import read_variable
from psengine.errors import ConfigurationError, PSEngineError
from psengine.parameter_server.client.addresses import keys_from_environment, parse_addresses
from psengine.parameter_server.overview import merge_jobs
from psengine.parameter_server.status_model import ServerStatus
from psengine.protocol.keys import CurveClientKeys

if TYPE_CHECKING:
    from psengine.parameter_server.client.client import Client


class ProtocolSource:
    """A server asked as workers ask it."""

    def __init__(self, address: str, keys: CurveClientKeys | None, timeout_s: float) -> None:
        self.address = address
        self._keys = keys
        self._timeout_s = timeout_s
        self._client: Client | None = None

    def read(self) -> ServerStatus:
        """The server's status; raises where there is none. Blocks for the timeout at most, per shard."""
        from psengine.parameter_server.client.client import connect

        if self._client is None:
            wait_s = self._timeout_s
            self._client = connect(
                self.address, role="reader", timeout_s=wait_s, connect_timeout_s=wait_s, keys=self._keys
            )
        shards = self._client.status()
        # A shard's report has some of its server's fields too.
        page: dict[str, Any] = {"healthy": True, "shards": shards}
        for shard in shards:
            page |= {name: shard[name] for name in ("epoch", "software", "unix_s") if name in shard}
        return read_status(page, self.address)

    def close(self) -> None:
        """Drop the connection; the next question makes a new one."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


class HttpSource:
    """A server's status page; attributes and methods as of ``ProtocolSource``."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.address = url
        base = url.removesuffix("/status.json")
        self._port = StatusHttp(base, timeout_s, token=reading_token(url), ca=trusted_ca())

    def read(self) -> ServerStatus:
        """Likewise."""
        url = f"{self._port.url}/status.json"
        try:
            code, kind, content = self._port.ask("/status.json")
        except NoHttpError as error:
            raise NoStatusError(f"{url} is no status page: {error}") from None
        if code != 200:
            reason = http.client.responses.get(code, "")
            text = f"{url} answers {code} {reason}; is it a psengine-server's?"
            if kind == "text/plain":
                text += f" It says: {content[:MAX_REASON_CHARACTERS].decode(errors='replace').strip()}"
            if code == 401:
                text += ". Fix: PSENGINE_STATUS_READ_TOKEN names the file of its token"
            raise NoStatusError(text)
        try:
            page = json.loads(content)
        except (ValueError, RecursionError):
            page = None
        if not (isinstance(page, dict) and isinstance(page.get("shards"), list) and "healthy" in page):
            raise NoStatusError(f"{url} is no status page of a psengine-server")
        return read_status(page, self.address)

    def close(self) -> None:
        """Nothing is held between questions."""


Source: TypeAlias = ProtocolSource | HttpSource


def open_sources(servers: str | None, timeout_s: float) -> list[Source]:
    """A source for each address of an argument, else of PSENGINE_SERVERS.

    Raises:
        ConfigurationError: none is named, one is malformed, or CURVE keys are half given.
    """
    text = servers if servers is not None else read_variable("PSENGINE_SERVERS") or ""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigurationError(
            "no server is named (expected tcp://host:port, or the http://... of a --status-port; got none)."
            " Fix: --server-address tcp://127.0.0.1:7077, or set PSENGINE_SERVERS"
        )
    keys = keys_from_environment()
    sources: list[Source] = []
    for part in dict.fromkeys(parts):
        if part.startswith(("http://", "https://")):
            sources.append(HttpSource(part, timeout_s))
            continue
        try:
            sources.extend(ProtocolSource(address, keys, timeout_s) for address in parse_addresses(part))
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}. A --status-port is asked as http://host:port") from None
    return sources


def ask(source: Source) -> ServerReport:
    """A server's report; never raises for a server that is away."""
    try:
        status = source.read()
        merge_jobs(status.answering)
    except (PSEngineError, OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        source.close()
        return ServerReport(address=source.address, error=printable(str(error)) or type(error).__name__)
    return ServerReport(address=source.address, status=status, answered_s=time.monotonic())


def ask_all(sources: Sequence[Source], job: str | None = None) -> Overview:
    """Ask all servers at once; with ``job`` about that job alone."""
    with ThreadPoolExecutor(max_workers=len(sources), thread_name_prefix="psengine-status") as pool:
        return merge(list(pool.map(ask, sources)), job)
