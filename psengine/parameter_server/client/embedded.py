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
from psengine.errors import ConfigurationError, ServerError

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

    def __init__(self, process: subprocess.Popen[str], output: _Output) -> None:
        self.addresses = output.addresses
        self.pid = process.pid
        self._process = process
        self._output = output
        # At exit too.
        self._finalizer = weakref.finalize(self, _stop, process, output)

    @classmethod
    def start(
        cls,
        *,
        shards: int = 1,
        arguments: Sequence[str] = (),
        process: subprocess.Popen[str] | None = None,
        deadline_s: float = START_S,
    ) -> EmbeddedServer:
        """Start a server on a new Unix socket, which this user alone reaches, and wait until it serves.

        Args:
            shards: its threads.
            arguments: more options of ``psengine-server``.
            process: from ``launch``; None launches one.
            deadline_s: how long the start may take.

        Raises:
            ServerError: it ended, or was not ready in time; the message has its output.
        """
        process = process or launch()
        try:
            bind = new_socket("embedded")
        except ConfigurationError as error:
            discard(process)
            raise ServerError(f"the embedded parameter server has no place for its socket: {error}") from error
        line = ["--bind", bind, "--shards", str(shards), "--until-stdin-closes", *arguments]
        output = _Output(process)
        assert process.stdin is not None
        with suppress(OSError):  # the process has ended; its output says why
            process.stdin.write(json.dumps(line) + "\n")
            process.stdin.flush()
        output.is_decided.wait(deadline_s)
        if output.addresses:
            return cls(process, output)
        has_ended = output.is_decided.is_set()
        if not has_ended:
            process.kill()
        _close(process)
        output.thread.join(STOP_S)
        fate = f"ended with exit code {process.poll()}" if has_ended else f"was not ready after {deadline_s:g} s"
        raise ServerError(f"the embedded parameter server {fate}. It wrote:\n{output.text() or '(nothing)'}")

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        """Whether its process runs."""
        return self._process.poll() is None

    def log(self) -> str:
        """The last lines it wrote."""
        return self._output.text()

    def terminate(self, deadline_s: float) -> bool:
        """Ask it to end in order, with or without workers; whether it did within ``deadline_s``."""
        self._process.terminate()
        return _has_ended(self._process, deadline_s)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

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
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    process.wait()


class _Output:
    """Reads what a server writes, for as long as it runs: a full pipe would stop it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.addresses: tuple[str, ...] = ()
        self.is_decided = threading.Event()  # the server is ready, or has ended
        self._process = process
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self.thread = threading.Thread(target=self._read, name="psengine-embedded-output", daemon=True)
        self.thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                text = line.rstrip("\n")
                self._lines.append(text)
                if text.startswith(READY):
                    # The line lists all shards; clients ask the first for the others.
                    self.addresses = tuple(text.removeprefix(READY).replace(",", " ").split())[:1]
                    self.is_decided.set()
                logger.info("server %d: %s", self._process.pid, text)
        self._process.wait()
        self.is_decided.set()

    def text(self) -> str:
        """The last lines."""
        return "\n".join(self._lines)


def _stop(process: subprocess.Popen[str], output: _Output) -> None:
    _close(process)
    if _has_ended(process, STOP_S):
        output.thread.join(STOP_S)
    else:
        logger.info("embedded server %d still has workers; it ends when the last one leaves", process.pid)


def _has_ended(process: subprocess.Popen[str], deadline_s: float) -> bool:
    try:
        process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _close(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.close()
    except OSError:
        logger.debug("server %d has ended already", process.pid)
