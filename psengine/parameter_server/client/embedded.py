"""A server process that a worker starts for its host; it ends when nobody needs it.

    worker   launch ─── start: command line ── stdin pipe open ───────────── stop: pipe closed
    server     └─ imports ───────┴─ ready line ─ serves ─ ...                       └─ ends once no worker is a member

A server takes its command line from its standard input: a launcher that does not know all of it yet can start the
process, which imports torch meanwhile. The kernel closes the pipe also when the worker's process dies; the other
workers of the server are not disturbed.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from psengine.environment.local_sockets import new_socket
from psengine.environment.variables import RUN_ID, inherited_variables
from psengine.errors import ServerError

logger = logging.getLogger(__name__)

READY = "psengine-server ready "
START_S = 30.0
STOP_S = 5.0
_KEPT_LINES = 60


class EmbeddedServer:
    """A running psengine-server that this process started; made by ``start``. A context manager.

    Attributes:
        addresses: the address of its first shard, where clients connect.
        pid: of its process.
    """

    def __init__(self, process: _Process) -> None:
        self.addresses = process.addresses
        self.pid = process.popen.pid
        self._process = process
        # At exit too.
        self._finalizer = weakref.finalize(self, process.stop)

    @classmethod
    def start(
        cls,
        *,
        arguments: Sequence[str] = (),
        process: subprocess.Popen[str] | None = None,
        deadline_s: float = START_S,
    ) -> EmbeddedServer:
        """Start a server of one shard on a new Unix socket, which this user alone reaches, and wait until it serves.

        Args:
            arguments: more options of ``psengine-server``.
            process: from ``launch``; None launches one.
            deadline_s: how long the start may take.

        Raises:
            ConfigurationError: there is no place for the socket.
            ServerError: it ended, or was not ready in time; the message has its output.
        """
        line = ["--bind", new_socket("embedded"), "--shards", "1", "--until-stdin-closes", *arguments]
        server = _Process(process or launch())
        with suppress(OSError):  # the process has ended; its output says why
            print(json.dumps(line), file=server.popen.stdin, flush=True)
        server.is_decided.wait(deadline_s)
        if server.addresses:
            return cls(server)
        fate = f"was not ready after {deadline_s:g} s"
        if server.is_decided.is_set():
            fate = f"ended with exit code {server.popen.poll()}"
        server.popen.kill()
        server.stop()
        raise ServerError(f"the embedded parameter server {fate}. It wrote:\n{server.text() or '(nothing)'}")

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        """Whether its process runs."""
        return self._process.popen.poll() is None

    def log(self) -> str:
        """The last lines it wrote."""
        return self._process.text()

    def terminate(self) -> None:
        """Ask it to end in order, with or without workers."""
        self._process.popen.terminate()

    def kill(self) -> None:
        """End it at once."""
        self._process.popen.kill()

    def stop(self) -> None:
        """Let it end, at once or when the last worker has left; waits ``STOP_S`` at most. Idempotent."""
        self._finalizer()


def launch() -> subprocess.Popen[str]:
    """Start the process of a server for ``EmbeddedServer.start``: it imports what a server needs, and waits."""
    return subprocess.Popen(
        [sys.executable, "-m", "psengine.cli.server", "--arguments-from-stdin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # Its own session: a Ctrl-C is for the workers, which then leave it.
        start_new_session=True,
        # It is no worker of a run, which ends what its workers leave behind.
        env={**inherited_variables(), RUN_ID: ""},
    )


def discard(process: subprocess.Popen[str]) -> None:
    """End a launched process that no server was made of."""
    with process:
        process.kill()


class _Process:
    """Reads what a server writes, for as long as it runs: a full pipe would stop it."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen
        self.addresses: tuple[str, ...] = ()
        self.is_decided = threading.Event()  # the server is ready, or has ended
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._reader = threading.Thread(target=self._read, name="psengine-embedded-output", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with self.popen.stdout as stream:
            for line in stream:
                text = line.rstrip("\n")
                self._lines.append(text)
                if text.startswith(READY):
                    # The line lists all shards; clients ask the first for the others.
                    self.addresses = tuple(text.removeprefix(READY).replace(",", " ").split())[:1]
                    self.is_decided.set()
                logger.info("server %d: %s", self.popen.pid, text)
        self.popen.wait()
        self.is_decided.set()

    def text(self) -> str:
        """The last lines."""
        return "\n".join(self._lines)

    def stop(self) -> None:
        """Close its pipe; see ``EmbeddedServer.stop``."""
        assert self.popen.stdin is not None
        with suppress(OSError):  # it has ended already
            self.popen.stdin.close()
        try:
            self.popen.wait(STOP_S)
            self._reader.join(STOP_S)
        except subprocess.TimeoutExpired:
            logger.info("embedded server %d still has workers; it ends when the last one leaves", self.popen.pid)
