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
# Starting imports torch: three seconds on a calm machine, half a minute on a busy one.
START_S = 60.0
STOP_S = 5.0
_KEPT_LINES = 60


class EmbeddedServer:
    """A running psengine-server that this process started; made by ``start``. A context manager.

    Attributes:
        process: the server's.
        addresses: the address of its first shard, where clients connect.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.addresses: tuple[str, ...] = ()
        self._is_decided = threading.Event()  # the server is ready, or has ended
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        # For as long as the server runs: a full pipe would stop it.
        self._reader = threading.Thread(target=self._read, name="psengine-embedded-output", daemon=True)
        self._reader.start()
        # At exit too, once the sessions that were made later have said goodbye.
        self._finalizer = weakref.finalize(self, self._stop)

    @classmethod
    def start(cls, *, arguments: Sequence[str] = (), process: subprocess.Popen[str] | None = None) -> EmbeddedServer:
        """Start a server of one shard on a new Unix socket, which this user alone reaches, and wait until it serves.

        Args:
            arguments: more options of ``psengine-server``.
            process: from ``launch``; None launches one.

        Raises:
            ConfigurationError: there is no place for the socket.
            ServerError: it ended, or was not ready in time; the message has its output.
        """
        line = ["--bind", new_socket("embedded"), "--shards", "1", "--until-stdin-closes", *arguments]
        server = cls(process or launch())
        with suppress(OSError):  # the process has ended; its output says why
            print(json.dumps(line), file=server.process.stdin, flush=True)
        server._is_decided.wait(START_S)
        if server.addresses:
            return server
        code = server.process.poll()
        fate = f"was not ready after {START_S:g} s" if code is None else f"ended with exit code {code}"
        server.process.kill()
        server.stop()
        raise ServerError(f"the embedded parameter server {fate}. It wrote:\n{server.log() or '(nothing)'}")

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def log(self) -> str:
        """The last lines it wrote."""
        return "\n".join(self._lines)

    def stop(self) -> None:
        """Let it end, at once or when the last worker has left; waits ``STOP_S`` at most. Idempotent."""
        self._finalizer()

    def _stop(self) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):  # it has ended already
            self.process.stdin.close()
        try:
            self.process.wait(STOP_S)
            self._reader.join(STOP_S)
        except subprocess.TimeoutExpired:
            logger.info("embedded server %d still has workers; it ends when the last one leaves", self.process.pid)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                text = line.rstrip("\n")
                self._lines.append(text)
                if text.startswith(READY):
                    # The line lists all shards; clients ask the first for the others.
                    self.addresses = tuple(text.removeprefix(READY).replace(",", " ").split())[:1]
                    self._is_decided.set()
                logger.info("server %d: %s", self.process.pid, text)
        self.process.wait()
        self._is_decided.set()


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
