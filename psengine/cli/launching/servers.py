"""The parameter servers of one ``psengine run``: started, started again where one dies, ended in order.

With durability replica each has a follower, and a file says which of the two leads (``record_file.py``). One that dies
is started again and follows the other; a leader that is silent is killed at its follower's word.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from psengine.cli.launching.plan import Plan, RunOptions, expected_servers
from psengine.errors import ConfigurationError, PSEngineError, ServerError
from psengine.parameter_server.client.embedded import START_S, EmbeddedServer, launch
from psengine.parameter_server.server.log.disk import check_link
from psengine.parameter_server.server.replication.election import ElectorError, Leadership
from psengine.parameter_server.server.replication.record_file import FileElector

# A server that dies, or fails to start, so often in so long is given up.
MAX_DEATHS = 3
DEATHS_WITHIN_S = 120.0  # longer than as many starts that hang
# How much a crash of a server may lose unless --server-option says otherwise; psengine-server's own default is 60 s.
SNAPSHOT_INTERVAL_S = 15.0
END_S = 20.0

# With log_format=json a quotation mark follows.
_STATUS = re.compile(r"(?:status|dashboard) at (http://[\w.:\[\]-]+)")


@contextmanager
def launched_servers(options: RunOptions) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes for the servers that a run will probably start; those that it leaves in the list are ended.

    They import torch while the launcher does, before it can decide the run.
    """
    launched: list[subprocess.Popen[str]] = []
    try:
        launched += [launch() for _ in range(expected_servers(options) * _copies(options))]
        yield launched
    finally:
        for process in launched:
            with process:
                process.kill()


class ServerGroup:
    """A context manager: servers on loopback, which keep their addresses when they are started again.

    ``launched`` are processes to make them of; further ones are launched where they are too few.

    Attributes:
        addresses: of all servers, each with its follower's where it has one, as PSENGINE_SERVERS takes them.
    """

    def __init__(
        self,
        plan: Plan,
        snapshot_dir: Path,
        *,
        report: Callable[[str], None],
        launched: list[subprocess.Popen[str]] | None = None,
    ) -> None:
        self.addresses: list[str] = []
        self._plan = plan
        self._snapshot_dir = Path(plan.options.snapshot_dir or snapshot_dir)
        self._settings = _settings(plan.options)
        self._has_log = "log" in self._settings.get("durability", "")
        self._status_port = str(plan.options.status_port)
        self._report = report
        self._launched = [] if launched is None else launched
        # A server and its follower are next to each other.
        self._copies = _copies(plan.options)
        self._servers: list[EmbeddedServer] = []
        self._binds: list[str] = []
        self._deaths: list[deque[float]] = [deque(maxlen=MAX_DEATHS) for _ in range(plan.servers * self._copies)]
        # By server: where it and its follower keep their state; who leads; when somebody did, or was started, last.
        self._directories = [self._newest_first(f"server-{index}") for index in range(plan.servers)]
        self._electors = [FileElector(self._record(index)) for index in range(plan.servers if self._copies > 1 else 0)]
        self._led_s = [0.0] * plan.servers

    def __enter__(self) -> ServerGroup:
        try:
            processes = self._plan.servers * self._copies
            self._launched += [launch() for _ in range(processes - len(self._launched))]
            for index in range(processes):
                self._servers.append(self._start(index, "tcp://127.0.0.1:0"))
                self._binds += self._servers[index].addresses
                if self._electors:
                    self._await_members(index % self._copies + 1, self._electors[index // self._copies])
            pairs = range(0, processes, self._copies)
            self.addresses = ["|".join(self._binds[first : first + self._copies]) for first in pairs]
            status = _STATUS.search(self._servers[0].log())
            self._status_port = status[1].rpartition(":")[2] if status else self._status_port
            count = "1 server" if self._plan.servers == 1 else f"{self._plan.servers} servers"
            dashboard = f"; dashboard at {status[1]}" if status else ""
            followed = ", each with a follower," if self._electors else ""
            self._report(f"{count}{followed} at {','.join(self.addresses)}{dashboard}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, kind: object = None, error: BaseException | None = None, trace: object = None) -> None:
        """End all servers in order; by force, after a second signal or at a signal meanwhile, at once."""
        from psengine.cli.launching.processes import is_forced

        try:
            for server in self._servers:
                server.process.terminate()
            deadline_s = time.monotonic() + (0.0 if is_forced(error) else END_S)
            while (
                running := [one for one in self._servers if one.process.poll() is None]
            ) and time.monotonic() < deadline_s:
                time.sleep(0.02)
            for server in running:
                self._report(f"server {server.process.pid} did not end in time and was killed")
        finally:
            for server in self._servers:
                server.process.kill()
                server.stop()

    def revive(self) -> str:
        """Start again the servers that died; return why that is given up, "" while all is well."""
        try:
            for number, elector in enumerate(self._electors):
                if failure := self._supervise(number, elector):
                    return failure
            for index, server in enumerate(self._servers):
                if server.process.poll() is not None and (failure := self._revive(index, server)):
                    return failure
        except ElectorError as error:
            return str(error)
        return ""

    def _start(self, index: int, bind: str) -> EmbeddedServer:
        number, copy = divmod(index, self._copies)
        directory = self._directories[number][copy]
        try:
            check_link(directory.absolute())
            directory.mkdir(parents=True, exist_ok=True)
            if len(self._servers) == index and not copy and not self._has_log:
                # Nobody of the run before lives. Without a log it does not say who has more.
                self._record(number).unlink(missing_ok=True)
        except OSError as error:
            raise ConfigurationError(f"--snapshot-dir is a folder for the servers to write in (got {error})") from error
        arguments = ["--bind", bind, "--snapshot-dir", str(directory)]
        if index == 0:
            arguments += ["--status-port", self._status_port]
        if self._electors:
            arguments += ["--election", f"launcher={self._record(number)}"]
        if "snapshot-interval-s" not in self._settings:
            arguments += ["--snapshot-interval-s", str(SNAPSHOT_INTERVAL_S)]
        for name, value in self._settings.items():
            arguments += [f"--{name}"] if value.lower() in ("", "true", "yes") else [f"--{name}", value]
        process = self._launched.pop() if self._launched else None
        server = EmbeddedServer.start(arguments=arguments, process=process)
        self._led_s[number] = time.monotonic()  # it could not lead before it was there
        return server

    def _newest_first(self, name: str) -> list[Path]:
        """The directories of a server and its follower: whoever leads first has the newest snapshot of a run before."""

        def newest_s(directory: Path) -> float:
            return max((one.stat().st_mtime for one in directory.glob("generation-*")), default=0.0)

        found = [self._snapshot_dir / name, self._snapshot_dir / f"{name}-follower"]
        return sorted(found, key=newest_s, reverse=True) if self._copies > 1 else found

    def _record(self, number: int) -> Path:
        return self._snapshot_dir / f"server-{number}-leadership"

    def _await_members(self, count: int, elector: FileElector) -> None:
        """Wait until somebody leads, and then until its follower has all: from then on a death loses nothing."""
        deadline_s = time.monotonic() + START_S
        while (record := elector.read()[0]) is None or len(record.members) < count:
            if time.monotonic() > deadline_s:
                words = "\n".join(server.log() for server in self._servers[-count:])
                raise ServerError(f"nobody leads, or follows and has all, after {START_S:g} s. They wrote:\n{words}")
            time.sleep(0.02)

    def _supervise(self, number: int, elector: FileElector) -> str:
        """Kill a leader that is silent; why nobody can lead any more, "" while somebody does, or may yet."""
        first, now_s = number * self._copies, time.monotonic()
        if (record := elector.to_end()) is not None:
            for index in range(first, first + self._copies):
                if self._binds[index] in record.members[0].addresses:
                    self._report(f"the server at {self._binds[index]} is silent; it is killed, and its follower leads")
                    self._servers[index].process.kill()
                    self._servers[index].process.wait()
        if elector.read()[1]:
            self._led_s[number] = now_s
        if now_s - self._led_s[number] <= START_S:
            return ""
        return f"none of {self.addresses[number]} leads after {START_S:g} s. Fix: begin anew; psengine status says why"

    def _revive(self, index: int, server: EmbeddedServer) -> str:
        address, deaths = self._binds[index], self._deaths[index]
        deaths.append(time.monotonic())
        if len(deaths) == MAX_DEATHS and deaths[-1] - deaths[0] <= DEATHS_WITHIN_S:
            words = "\n".join(f"  {line}" for line in server.log().splitlines()[-12:])
            return (
                f"the server at {address} died, or could not be started again, {MAX_DEATHS} times in"
                f" {DEATHS_WITHIN_S:g} s. It wrote last:\n{words or '  (nothing)'}"
            )
        goes_on = self._goes_on(index) if self._electors else ""
        self._report(f"the server at {address} (process {server.process.pid}) died; starting it again{goes_on}")
        server.stop()
        try:
            self._servers[index] = self._start(index, address)
        except (PSEngineError, OSError) as error:
            self._report(str(error))  # the dead server is found again, and counts again
        else:
            self._report(f"the server at {address} is back (process {self._servers[index].process.pid})")
        return ""

    def _goes_on(self, index: int) -> str:
        """What follows from a death, for people; "" where that is not known yet.

        Without a log a dead follower has nothing, and is recorded no more: so once its leader is dead too, that one's
        next life leads.
        """
        elector, other = self._electors[index // self._copies], self._binds[index ^ 1]
        record, is_held = elector.read()
        if record is None:
            return ""
        leader, followers = record.members[0].addresses, [one.addresses[0] for one in record.members[1:]]
        if self._binds[index] in followers and not self._has_log:
            followers = []
            elector.replace(record, Leadership(record.term, record.members[:1], record.number + 1), takes_over=False)
        lives = self._servers[index ^ 1].process.poll() is None
        if lives and (other in followers or (other in leader and is_held)):
            return f" as the follower of the one at {other}, which leads"
        if self._has_log or followers or (other in leader and not lives):
            return ""
        return f". Nobody else has all: {leader[0]} goes on from its last snapshot, and workers say what is lost"


def _settings(options: RunOptions) -> dict[str, str]:
    """``["lease_s=10"]`` as psengine-server spells it; whether it has such a setting it says itself."""
    named = (option.partition("=") for option in options.server_option or ())
    return {name.strip().lstrip("-").replace("_", "-"): value for name, _, value in named}


def _copies(options: RunOptions) -> int:
    """How many processes have what a server has."""
    return 2 if "replica" in _settings(options).get("durability", "") else 1
