"""The parameter servers of one ``psengine run``: started, started again where one dies, ended in order."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from psengine.cli.launching.plan import Plan, RunOptions, expected_servers
from psengine.errors import ServerError
from psengine.parameter_server.client.embedded import EmbeddedServer, discard, launch

# A server that dies, or fails to start, so often in so long is given up.
MAX_DEATHS = 3
DEATHS_WITHIN_S = 120.0  # longer than as many starts that hang
# How much a crash of a server may lose unless --server-option says otherwise; psengine-server's own default is 60 s.
SNAPSHOT_INTERVAL_S = 15.0
END_S = 20.0
PAGE_S = 1.0

# With log_format=json a quotation mark follows.
_STATUS = re.compile(r"(?:status|dashboard) at (http://[\w.:\[\]-]+)")


@contextmanager
def launched_servers(options: RunOptions) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes for the servers that a run will probably start; those that it leaves in the list are ended.

    They import torch while the launcher does, before it can decide the run.
    """
    launched: list[subprocess.Popen[str]] = []
    try:
        launched += [launch() for _ in range(expected_servers(options))]
        yield launched
    finally:
        for process in launched:
            discard(process)


class ServerGroup:
    """A context manager: servers on local sockets, which keep their addresses when they are started again.

    ``launched`` are processes to make them of; further ones are launched where they are too few.

    Attributes:
        addresses: of all servers.
        dashboard_url: of the first one's status port.
    """

    def __init__(
        self,
        plan: Plan,
        snapshot_dir: Path,
        *,
        launched: list[subprocess.Popen[str]] | None = None,
        report: Callable[[str], None],
        is_hurried: Callable[[], bool],
    ) -> None:
        self.addresses: list[str] = []
        self.dashboard_url = ""
        self._count = plan.servers
        self._snapshot_dir = plan.options.snapshot_dir or snapshot_dir
        self._status_port = plan.options.status_port
        self._options = plan.server_arguments
        self._report = report
        self._is_hurried = is_hurried
        self._launched = [] if launched is None else launched
        self._servers: list[EmbeddedServer] = []
        self._deaths: list[deque[float]] = [deque(maxlen=MAX_DEATHS) for _ in range(plan.servers)]

    def __enter__(self) -> ServerGroup:
        try:
            while len(self._launched) < self._count:
                self._launched.append(launch())
            for index in range(self._count):
                self._servers.append(self._start(index, "tcp://127.0.0.1:0"))
                self.addresses += self._servers[index].addresses
            status = _STATUS.search(self._servers[0].log())
            self.dashboard_url = status[1] if status else ""
            count = "1 server" if self._count == 1 else f"{self._count} servers"
            self._report(f"{count} at {','.join(self.addresses)}; dashboard at {self.dashboard_url}")
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
            arguments += ["--status-port", self.dashboard_url.rpartition(":")[2] or str(self._status_port)]
        if "--snapshot-interval-s" not in self._options:
            arguments += ["--snapshot-interval-s", str(SNAPSHOT_INTERVAL_S)]
        try:
            process = self._launched.pop() if self._launched else None
            return EmbeddedServer.start(arguments=[*arguments, *self._options], process=process)
        except ServerError as error:
            raise ServerError(f"server {index}: {error}") from error

    def _revive(self, index: int, server: EmbeddedServer) -> str:
        address, deaths = self.addresses[index], self._deaths[index]
        deaths.append(time.monotonic())
        if len(deaths) == MAX_DEATHS and deaths[-1] - deaths[0] <= DEATHS_WITHIN_S:
            words = "\n".join(f"  {line}" for line in server.log().splitlines()[-12:])
            return (
                f"the server at {address} died, or could not be started again, {MAX_DEATHS} times in"
                f" {DEATHS_WITHIN_S:g} s. It wrote last:\n{words or '  (nothing)'}"
            )
        self._report(f"the server at {address} (process {server.pid}) died; starting it again")
        server.stop()
        try:
            self._servers[index] = self._start(index, address)
        except ServerError as error:
            self._report(str(error))  # the dead server is found again, and counts again
        else:
            self._report(f"the server at {address} is back (process {self._servers[index].pid})")
        return ""

    def _end_all(self) -> None:
        enders = [threading.Thread(target=self._end, args=(server,), daemon=True) for server in self._servers]
        for ender in enders:
            ender.start()
        while any(ender.is_alive() for ender in enders) and not self._is_hurried():
            time.sleep(0.02)
        if self._is_hurried():
            for server in self._servers:
                server.kill()

    def _end(self, server: EmbeddedServer) -> None:
        if server.is_running and not server.terminate(END_S):
            self._report(f"server {server.pid} did not end within {END_S:g} s and was killed")
            server.kill()
        server.stop()
