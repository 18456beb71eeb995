"""Real etcd servers (Debian: etcd-server), each with a directory; they can be stopped, killed and started again."""

import json
import shutil
import signal
import ssl
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from support.processes import free_port
from support.waiting import eventually

needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd (Debian: etcd-server)")


class EtcdServer:
    """Made by ``etcd_server`` and ``etcd_cluster``; ``place`` is its HOST:PORT, which stays.

    Args:
        peers: URLs at which all servers of the cluster hear each other; ``index`` is this one's.
        certificate: a CA's, which signed itself, with its key beside it as ``key.pem``; None: without TLS.
    """

    def __init__(self, directory: Path, peers: list[str], index: int = 0, certificate: Path | None = None) -> None:
        self.place = f"127.0.0.1:{free_port()}"
        self._directory, self._peers, self._index, self._certificate = directory, peers, index, certificate
        self._url = f"{'http' if certificate is None else 'https'}://{self.place}"
        self._log = (directory / "log").open("a+")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, with what it has, and wait until it serves."""
        self.launch()
        self.await_health()

    def launch(self) -> None:
        """Start it."""
        peer, cluster = self._peers[self._index], [f"{number}={one}" for number, one in enumerate(self._peers)]
        arguments = ["--name", str(self._index), "--data-dir", str(self._directory / "data")]
        arguments += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        arguments += ["--initial-cluster", ",".join(cluster)]
        arguments += ["--listen-client-urls", self._url, "--advertise-client-urls", self._url]
        if self._certificate is not None:
            arguments += ["--cert-file", str(self._certificate), "--key-file"]
            arguments += [str(self._certificate.with_name("key.pem"))]
        self._process = subprocess.Popen(["etcd", *arguments], stdout=self._log, stderr=self._log)

    def await_health(self) -> None:
        """Wait until it serves."""
        eventually(self._is_healthy, "etcd serves")

    def post(self, path: str, **body: object) -> None:
        """A request without an answer of interest."""
        context = None if self._certificate is None else ssl.create_default_context(cafile=self._certificate)
        url, data = f"{self._url}/v3/{path}", json.dumps(body).encode()
        urllib.request.urlopen(urllib.request.Request(url, data), timeout=60.0, context=context).close()

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
        context = None if self._certificate is None else ssl.create_default_context(cafile=self._certificate)
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=1.0, context=context) as answer:
                return b'"true"' in answer.read()
        except OSError:
            return False


@contextmanager
def etcd_cluster(count: int, certificate: Path | None = None) -> Iterator[list[EtcdServer]]:
    """So many servers of one cluster, which serve."""
    peers = [f"http://127.0.0.1:{free_port()}" for _ in range(count)]
    with ExitStack() as stack:
        servers = []
        for index in range(count):
            made = tempfile.TemporaryDirectory(prefix="psengine-etcd-", ignore_cleanup_errors=True)
            servers.append(EtcdServer(Path(stack.enter_context(made)), peers, index, certificate))
            stack.callback(servers[index]._log.close)
            stack.callback(servers[index].end)
            servers[index].launch()
        for server in servers:
            server.await_health()
        yield servers


@contextmanager
def etcd_server(certificate: Path | None = None) -> Iterator[EtcdServer]:
    """One that serves."""
    with etcd_cluster(1, certificate) as (server,):
        yield server
