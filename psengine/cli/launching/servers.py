"""The parameter servers of one ``psengine run``: started, started again where one dies, ended in order."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from psengine.errors import ConfigurationError, ServerError
from psengine.parameter_server.client.embedded import EmbeddedServer

# A server that dies so often in so long will not be well after another start.
MAX_DEATHS = 3
DEATHS_WITHIN_S = 60.0
MAX_STARTS = 3
# What a crash of a server may lose, where nobody says; psengine-server's own default is a minute.
SNAPSHOT_INTERVAL_S = 15.0
END_S = 20.0
PAGE_S = 1.0

# With log_format=json a quotation mark follows.
_STATUS = re.compile(r"(?:status|dashboard) at (http://[\w.:\[\]-]+)")
_OURS = ("bind", "shards", "snapshot_dir", "status_port")


class ServerGroup:
    """A context manager: servers on local sockets, which keep their addresses when they are started again.

    Args:
        count: how many; each keeps a part of the model.
        snapshot_dir: each server's snapshots go into a directory of its own there.
        status_port: of the first server's dashboard; 0 takes a free one.
        options: further ones of psengine-server, as ``lease_s=10``.
        report: takes a line about what happened to a server.
        is_hurried: whether to end the servers by force.

    Attributes:
        addresses: of all servers.
        dashboard_url: of the first one's status port.
    """

    def __init__(
        self,
        count: int,
        *,
        snapshot_dir: Path,
        status_port: int,
        options: Sequence[str],
        report: Callable[[str], None],
        is_hurried: Callable[[], bool],
    ) -> None:
        self.addresses: list[str] = []
        self.dashboard_url = ""
        self._count = count
        self._snapshot_dir = snapshot_dir
        self._status_port = status_port
        self._options = server_options(options)
        self._report = report
        self._is_hurried = is_hurried
        self._servers: list[EmbeddedServer] = []
        self._deaths: list[deque[float]] = [deque(maxlen=MAX_DEATHS) for _ in range(count)]

    def __enter__(self) -> ServerGroup:
        try:
            for index in range(self._count):
                self._servers.append(self._start(index, "tcp://127.0.0.1:0"))
                self.addresses += self._servers[index].addresses
            status = _STATUS.search(self._servers[0].log())
            self.dashboard_url = status[1] if status else ""
        except BaseException:
            self._end_all()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._end_all()

    def revive(self) -> str:
        """Start again the servers that died; return why that is given up, "" while all is well."""
        for index, server in enumerate(self._servers):
            if not server.is_running and (failure := self._revive(index, server)):
                return failure
        return ""

    def had_workers(self) -> bool:
        """Whether a worker has ever joined the first server; True where that cannot be known."""
        if not self.dashboard_url or self._deaths[0]:
            return True  # a server that was started again does not know whom it had
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self.dashboard_url}/status.json", timeout=PAGE_S) as page:
                events = json.load(page)["events"]
        except (OSError, ValueError, KeyError):
            return True
        # Only the latest events are kept: where the start is not among them, much has happened.
        is_whole = any(event["kind"] == "started" for event in events)
        return not is_whole or any(event["worker"] is not None for event in events)

    def _start(self, index: int, bind: str) -> EmbeddedServer:
        directory = self._snapshot_dir / f"server-{index}"
        directory.mkdir(parents=True, exist_ok=True)
        arguments = ["--bind", bind, "--snapshot-dir", str(directory)]
        if index == 0:
            port = self.dashboard_url.rpartition(":")[2] or str(self._status_port)
            arguments += ["--status-port", port]
        if "--snapshot-interval-s" not in self._options:
            arguments += ["--snapshot-interval-s", str(SNAPSHOT_INTERVAL_S)]
        try:
            return EmbeddedServer.start(arguments=[*arguments, *self._options])
        except ServerError as error:
            raise ServerError(f"server {index}: {error}") from error

    def _revive(self, index: int, server: EmbeddedServer) -> str:
        address, deaths, words = self.addresses[index], self._deaths[index], server.log()
        deaths.append(time.monotonic())
        if len(deaths) == MAX_DEATHS and deaths[-1] - deaths[0] <= DEATHS_WITHIN_S:
            return _failure(f"the server at {address} died {MAX_DEATHS} times in {DEATHS_WITHIN_S:g} s", words)
        self._report(f"the server at {address} (process {server.pid}) died; starting it again")
        server.stop()
        for _ in range(MAX_STARTS):
            try:
                self._servers[index] = self._start(index, address)
            except ServerError as error:
                words = str(error)
                continue
            self._report(f"the server at {address} is back (process {self._servers[index].pid})")
            return ""
        return _failure(f"the server at {address} died, and could not be started again ({MAX_STARTS} attempts)", words)

    def _end_all(self) -> None:
        enders = [threading.Thread(target=self._end, args=(server,), daemon=True) for server in self._servers]
        for ender in enders:
            ender.start()
        for ender in enders:
            while ender.is_alive() and not self._is_hurried():
                ender.join(0.05)
        if self._is_hurried():
            for server in self._servers:
                server.kill()

    def _end(self, server: EmbeddedServer) -> None:
        if server.is_running and not server.terminate(END_S):
            self._report(f"server {server.pid} did not end within {END_S:g} s and was killed")
            server.kill()
        server.stop()


def _failure(failure: str, words: str) -> str:
    lines = "\n".join(f"  {line}" for line in words.splitlines()[-12:])
    return f"{failure}. It wrote last:\n{lines or '  (nothing)'}"


def server_options(options: Sequence[str]) -> list[str]:
    """``["lease_s=10"]`` as psengine-server takes them.

    Raises:
        ConfigurationError: no setting of psengine-server, or one that ``psengine run`` gives itself.
    """
    from psengine.parameter_server.server.settings import describe_settings

    known = describe_settings()
    arguments: list[str] = []
    for option in options:
        name, _, value = option.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if name not in known or name in _OURS:
            settings = ", ".join(setting for setting in known if setting not in _OURS)
            raise ConfigurationError(
                f"--server-option takes a setting of psengine-server that psengine run does not set itself (expected"
                f" NAME=VALUE with one of {settings}; got {option!r})"
            )
        is_flag = isinstance(known[name][1], bool)
        flag = f"--{name.replace('_', '-')}"
        if not is_flag:
            arguments += [flag, value]
        elif value.lower() in ("", "true", "1", "yes"):
            arguments.append(flag)
    return arguments
