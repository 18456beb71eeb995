"""A real etcd server (Debian: etcd-server) with a directory of its own; it can be stopped, killed and started again."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.processes import free_port
from support.waiting import eventually

needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd (Debian: etcd-server)")


class EtcdServer:
    """Made by ``etcd_server``; ``place`` is its HOST:PORT, which stays."""

    def __init__(self, directory: Path) -> None:
        self.place = f"127.0.0.1:{free_port()}"
        self._directory = directory
        self._log = (directory / "log").open("a+")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, with what it has, and wait until it serves."""
        urls, peers = f"http://{self.place}", "http://127.0.0.1:0"
        arguments = ["--data-dir", str(self._directory / "data"), "--listen-peer-urls", peers]
        arguments += ["--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}"]
        arguments += ["--listen-client-urls", urls, "--advertise-client-urls", urls]
        self._process = subprocess.Popen(["etcd", *arguments], stdout=self._log, stderr=self._log)
        eventually(self._is_healthy, "etcd serves")

    def signal(self, number: int) -> None:
        """Send it a signal, such as SIGSTOP."""
        assert self._process is not None
        self._process.send_signal(number)

    def end(self) -> None:
        """Kill it, and wait until it is gone."""
        if self._process is not None:
            self.signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait(10.0)

    def _is_healthy(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._directory / "log").read_text()[-2000:]
        try:
            with urllib.request.urlopen(f"http://{self.place}/health", timeout=1.0) as answer:
                return b'"true"' in answer.read()
        except OSError:
            return False


@contextmanager
def etcd_server() -> Iterator[EtcdServer]:
    """One that serves."""
    with tempfile.TemporaryDirectory(prefix="psengine-etcd-", ignore_cleanup_errors=True) as directory:
        server = EtcdServer(Path(directory))
        try:
            server.start()
            yield server
        finally:
            server.end()
            server._log.close()
