"""The parameter servers of one ``psengine run``: started, watched, started again where one dies, ended in order."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from psengine.errors import ConfigurationError, ServerError
from psengine.parameter_server.client.embedded import EmbeddedServer

if TYPE_CHECKING:
    from psengine.cli.server_status import ServerReport

WATCH_S = 0.2
# Who dies so often in so long will not be well after another start.
MAX_DEATHS = 3
DEATHS_WITHIN_S = 60.0
# What a crash of a server may lose, where nobody says; psengine-server's own default is a minute.
SNAPSHOT_INTERVAL_S = 15.0
END_S = 20.0
# At the end of a run; a page that does not answer so soon is not worth a wait.
PAGE_S = 1.0
_POLL_S = 0.05

# With log_format=json a quotation mark follows.
_STATUS = re.compile(r"(?:status|dashboard) at (http://[\w.:\[\]-]+)")
_OURS = ("bind", "shards", "snapshot_dir", "status_port")


class ServerGroup:
    """A context manager: servers on free loopback ports, which keep their ports when they are started again.

    Args:
        count: how many; each keeps a part of the model.
        snapshot_dir: each server's snapshots go into a directory of its own there.
        status_port: of the first server's dashboard; 0 takes a free one, None has none.
        options: further ones of psengine-server, as ``lease_s=10``.
        report: takes a line about what happened to a server.
        give_up: called when a server keeps dying; ``failure`` says why.

    Attributes:
        addresses: of all servers.
        dashboard_url: of the first one's status port; "" without.
        failure: why it gave up; "" while all is well.
    """

    def __init__(
        self,
        count: int,
        *,
        snapshot_dir: Path,
        status_port: int | None,
        options: Sequence[str],
        report: Callable[[str], None],
        give_up: Callable[[str], None],
    ) -> None:
        self.addresses: list[str] = []
        self.dashboard_url = ""
        self.failure = ""
        self._count = count
        self._snapshot_dir = snapshot_dir
        self._status_port = status_port
        self._options = server_options(options)
        self._report = report
        self._give_up = give_up
        self._servers: list[EmbeddedServer] = []
        self._deaths: list[deque[float]] = [deque(maxlen=MAX_DEATHS) for _ in range(count)]
        self._failed_starts = [0] * count
        self._last_words = [""] * count
        self._is_ending = threading.Event()
        self._is_killed = threading.Event()
        self._lock = threading.Lock()  # a server is either among those that end, or killed as soon as it serves
        self._thread = threading.Thread(target=self._watch, name="psengine-server-group", daemon=True)

    def __enter__(self) -> ServerGroup:
        try:
            for index in range(self._count):
                server = self._start(index, "tcp://127.0.0.1:0", self._status_port if index == 0 else None)
                self._servers.append(server)
                self.addresses += server.addresses
            status = _STATUS.search(self._servers[0].log())
            self.dashboard_url = status[1] if status else ""
            self._thread.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def has_joined_workers(self) -> bool | None:
        """Whether a worker has ever joined; None where that cannot be known. Asks for a second or two at most."""
        from psengine.cli.server_status import HttpSource

        # A server that was started again does not know whom it had.
        if not self.dashboard_url or self._deaths[0]:
            return None
        return has_joined_workers(HttpSource(self.dashboard_url, PAGE_S).ask())

    def stop(self) -> None:
        """End all servers in order, the slow ones by force. Safe twice."""
        self._is_ending.set()
        deadline_s = time.monotonic() + END_S
        with self._lock:
            servers = list(self._servers)
        enders = [threading.Thread(target=self._end, args=(server, deadline_s)) for server in servers]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()
        # It may be waiting for a server's start. That one is killed once it serves; or it ends by itself, at the latest
        # with this process, which holds its stdin.
        while self._thread.is_alive() and not self._is_killed.is_set() and time.monotonic() < deadline_s:
            self._thread.join(_POLL_S)
        self._servers = []

    def kill(self) -> None:
        """End all servers at once. From a signal's handler too: takes no lock."""
        self._is_ending.set()
        self._is_killed.set()
        for server in list(self._servers):
            server.kill()

    def _end(self, server: EmbeddedServer, deadline_s: float) -> None:
        if server.is_running and not server.terminate(max(0.1, deadline_s - time.monotonic())):
            self._report(f"server {server.pid} did not end within {END_S:g} s and was killed")
            server.kill()
        server.stop()

    def _start(self, index: int, bind: str, status_port: int | None) -> EmbeddedServer:
        directory = self._snapshot_dir / f"server-{index}"
        directory.mkdir(parents=True, exist_ok=True)
        arguments = ["--bind", bind, "--snapshot-dir", str(directory)]
        if status_port is not None:
            arguments += ["--status-port", str(status_port)]
        if not any(option.startswith("--snapshot-interval-s") for option in self._options):
            arguments += ["--snapshot-interval-s", str(SNAPSHOT_INTERVAL_S)]
        try:
            return EmbeddedServer.start(arguments=[*arguments, *self._options])
        except ServerError as error:
            raise ServerError(f"server {index}: {error}") from error

    def _watch(self) -> None:
        index = 0
        try:
            while not self._is_ending.wait(WATCH_S):
                for index, server in enumerate(list(self._servers)):
                    if not server.is_running and not self._is_ending.is_set():
                        self._revive(index, server)
        except Exception as error:
            # Without this thread a dead server would be mourned by nobody, and its workers would wait for it.
            if not self._is_ending.is_set():
                self._fail(f"psengine run cannot watch its servers any more ({type(error).__name__}: {error})", index)

    def _revive(self, index: int, server: EmbeddedServer) -> None:
        deaths = self._deaths[index]
        address = self.addresses[index]
        deaths.append(time.monotonic())
        failed_starts = self._failed_starts[index]
        if not failed_starts:
            self._last_words[index] = server.log()
        dies_often = len(deaths) == MAX_DEATHS and deaths[-1] - deaths[0] <= DEATHS_WITHIN_S
        # A start that hangs until its deadline fails seldom, and for ever.
        if dies_often or failed_starts == MAX_DEATHS:
            how = f"died {MAX_DEATHS} times in {DEATHS_WITHIN_S:g} s"
            if failed_starts:
                attempts = "1 attempt" if failed_starts == 1 else f"{failed_starts} attempts"
                how = f"died, and could not be started again ({attempts})"
            self._fail(f"the server at {address} {how}", index)
            return
        if not failed_starts:
            self._report(f"the server at {address} (process {server.pid}) died; starting it again")
            server.stop()
        status_port = None
        if index == 0 and self._status_port is not None:
            status_port = int(self.dashboard_url.rstrip("/").rpartition(":")[2]) if self.dashboard_url else 0
        try:
            revived = self._start(index, address, status_port)
        except (ServerError, OSError) as error:
            self._last_words[index] = str(error)
            self._failed_starts[index] += 1
            return  # another death; the next round counts it
        self._failed_starts[index] = 0
        with self._lock:
            is_late = self._is_ending.is_set()
            if not is_late:
                self._servers[index] = revived
        if is_late or self._is_killed.is_set():
            revived.kill()
        else:
            self._report(f"the server at {address} is back (process {revived.pid})")

    def _fail(self, failure: str, index: int) -> None:
        lines = "\n".join(f"  {line}" for line in self._last_words[index].splitlines()[-12:])
        self.failure = f"{failure}. It wrote last:\n{lines or '  (nothing)'}"
        self._is_ending.set()
        self._give_up(self.failure)


def has_joined_workers(report: ServerReport) -> bool | None:
    """Whether the server of ``report`` has ever had a worker; None where it does not tell."""
    if not report.is_complete or not report.page:
        return None
    # A job alone is none: it may come from a snapshot of an earlier run.
    jobs = [job for shard in report.shards for job in shard.get("jobs", {}).values()]
    events = report.page.get("events", ())
    if any(job.get("members") or job.get("departed") for job in jobs):
        return True
    if any(event.get("worker") is not None for event in events):
        return True
    # Only the latest events are kept: do these go back to the server's start?
    return False if any(event.get("kind") == "started" for event in events) else None


def server_options(options: Sequence[str]) -> list[str]:
    """``["lease_s=10"]`` as psengine-server takes them.

    Raises:
        ConfigurationError: no setting of psengine-server, or one that ``psengine run`` gives itself.
    """
    from psengine.parameter_server.server.settings import describe_settings

    known = describe_settings()
    arguments: list[str] = []
    for option in options:
        name, equals, value = option.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if name in _OURS:
            raise ConfigurationError(
                f"--server-option {option!r}: psengine run sets {name} itself"
                " (see --servers, --status-port and --snapshot-dir)"
            )
        is_flag = isinstance(known.get(name, ("", None))[1], bool)
        if name not in known or (not is_flag and not equals):
            settings = ", ".join(setting for setting in known if setting not in _OURS)
            raise ConfigurationError(
                f"--server-option takes a setting of psengine-server (expected NAME=VALUE with one of {settings};"
                f" got {option!r})"
            )
        flag = f"--{name.replace('_', '-')}"
        if not is_flag:
            arguments += [flag, value]
        elif value.lower() in ("", "true", "1", "yes"):
            arguments.append(flag)
    return arguments
