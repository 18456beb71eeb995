"""The one way tests start servers: a real process, port 0 or ipc, always ended, nothing left behind."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import zmq

from psengine.environment.local_sockets import way_to
from psengine.parameter_server.server.daemon import Server
from psengine.parameter_server.server.settings import ServerSettings
from psengine.protocol.frames import decode, encode, split
from psengine.protocol.layout import job_number
from psengine.protocol.messages import NOBODY, Message, MessageType
from psengine.tracing.logging_format import TextFormatter
from support.fault_workers import Reports, Worker, WorkerFailedError, worker_processes
from support.shard_world import APPLY, SGD

START_DEADLINE_S = 120.0
ANSWER_S = 30.0


class ServerFailedError(AssertionError):
    """The server ended before it was ready; the message holds its exit code and its log."""


@dataclass
class ServerProcess:
    """A running server.

    Attributes:
        addresses: of its shards.
        status_url: of its monitor.
        lines: what it announced at start-up.
    """

    addresses: list[str]
    status_url: str
    lines: list[str]
    _worker: Worker = field(repr=False)

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._worker.pid

    def terminate(self) -> None:
        """Ask it to end in order; ``wait`` for it."""
        self._worker.signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once and wait until it is gone."""
        self._worker.kill()

    def signal(self, number: int) -> None:
        """Send it a signal, such as SIGSTOP."""
        self._worker.signal(number)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Its exit code, negative for a signal."""
        code = self._worker.exit_code(timeout_s)
        assert code is not None, f"the server still ran after {timeout_s:g} s\n{self.log()}"
        return code

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._worker.exit_code() is None

    def log(self) -> str:
        """What it wrote to stdout and stderr so far."""
        return self._worker.log.read_text(errors="replace")

    def status(self) -> dict[str, Any]:
        """What /status.json says: pid, epoch, snapshot, and per shard the jobs."""
        with urllib.request.urlopen(f"{self.status_url}/status.json", timeout=10) as response:
            result: dict[str, Any] = json.load(response)
            return result

    def job(self, name: str) -> list[dict[str, Any]]:
        """One job's status at each shard that knows it."""
        return [shard["jobs"][name] for shard in self.status()["shards"] if name in shard["jobs"]]

    def coordinated(self, name: str) -> dict[str, Any]:
        """What the coordinator of a job says of it and its workers."""
        result: dict[str, Any] = self.status()["shards"][0]["coordinated"][name]
        return result


@contextmanager
def running_server(
    *,
    environment: dict[str, str] | None = None,
    until_stdin_closes: bool = False,
    stdin: int | None = None,
    sabotage: Callable[[], None] | None = None,
    **options: Any,
) -> Iterator[ServerProcess]:
    """A server with ``ServerSettings(**options)``; by default one shard on a free loopback port, and a monitor.

    A server restarted on its own address: pass ``bind=server.addresses[0]``.

    Args:
        environment: variables set in its process, besides this one's.
        sabotage: called in its process before it starts.
        until_stdin_closes, stdin: an embedded server, and the descriptor of a pipe to be its standard input.

    Raises:
        ServerFailedError: it ended, or said nothing, before it was ready.
    """
    options = {"bind": "tcp://127.0.0.1:0", "status_port": 0, **options}
    variables = {**os.environ, **(environment or {})}
    # Connections are how descriptors travel to a forkserver's child.
    pipe = None if stdin is None else Connection(os.dup(stdin), writable=False)
    with worker_processes() as workers:
        worker = workers.start(_serve, options, variables, until_stdin_closes, pipe, sabotage)
        try:
            ready, _ = worker.wait_for("ready", START_DEADLINE_S)
        except WorkerFailedError as error:
            raise ServerFailedError(f"the server was not ready (exit code {worker.exit_code(10.0)})\n{error}") from None
        try:
            yield ServerProcess(**ready, _worker=worker)
        except BaseException:
            print(f"--- server {worker.pid}\n{worker.log.read_text(errors='replace')}", file=sys.stderr)
            raise


def _serve(
    reports: Reports,
    options: dict[str, Any],
    environment: dict[str, str],
    until_stdin_closes: bool,
    stdin: Any,
    sabotage: Callable[[], None] | None,
) -> None:
    if stdin is not None:
        os.dup2(stdin.fileno(), 0)
        stdin.close()
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter())
    log = logging.getLogger("psengine")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    if sabotage is not None:
        sabotage()
    server = Server(ServerSettings(**options), until_stdin_closes=until_stdin_closes)
    lines: list[str] = []

    def announce(line: str) -> None:
        lines.append(line)
        print(line, flush=True)
        if line.startswith("psengine-server ready"):
            reports.say("ready", {"addresses": server.addresses, "status_url": server.status_url, "lines": lines})

    code = server.run(announce)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Peer:
    """A client without manners: one DEALER socket, and whatever the test wants to say.

    It is control and data connection in one. VIEW and RELEASE it forwards by itself, and answers PREPARE.
    Without keys it goes to the Unix socket beside ``address``, where there is one, as clients do; not ``over_tcp``.
    """

    def __init__(self, address: str, *, curve: Any = None, over_tcp: bool = False) -> None:
        self._context: Any = zmq.Context()
        self.socket: Any = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if curve is not None:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, curve.server_public.encode())
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, curve.own.public.encode())
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, curve.own.secret.encode())
        self.address = address
        self.socket.connect(address if curve is not None or over_tcp else way_to(address))
        self.job = "job"
        self.rank = self.incarnation = self.epoch = self.view = 0
        self.nonce = int.from_bytes(os.urandom(7), "little")
        self._requests = 0
        self._parts: list[Any] = []  # of a group that came

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def send(self, message: Any) -> None:
        self.socket.send_multipart(encode(message))

    def receive(self, timeout_s: float = ANSWER_S) -> Any:
        """The next message but VIEW, RELEASE and PREPARE; None where none comes in time."""
        until_s = time.monotonic() + timeout_s
        while True:
            message = self._next(max(0.0, until_s - time.monotonic()))
            if message is None or not self._is_of_views(message):
                return message

    def _next(self, timeout_s: float) -> Any:
        if not self._parts:
            if not self.socket.poll(int(timeout_s * 1000)):
                return None
            self._parts = split(self.socket.recv_multipart())
        return decode(self._parts.pop(0))

    def _is_of_views(self, message: Any) -> bool:
        """Whether this is the coordinator's word to all; it is obeyed."""
        kind = message.type.name
        if kind == "VIEW":
            self.view = message.view = message.body["view"][0]
        if kind in ("VIEW", "RELEASE"):
            self.send(message)
        elif kind == "PREPARE":
            self.send(self.message("COMMIT", body={"what": "prepared", "view": message.view, "completed": 0}))
        return kind in ("VIEW", "RELEASE", "PREPARE")

    def request(self, kind: str, *, timeout_s: float = ANSWER_S, **fields: Any) -> Any:
        """Send a message as the worker that said hello, and return the answer."""
        self.send(self.message(kind, **fields))
        return self.receive(timeout_s)

    def message(self, kind: str, **fields: Any) -> Any:
        self._requests += 1
        given = {"sequence": self._requests, "worker": self.rank, "incarnation": self.incarnation, **fields}
        return Message(MessageType[kind], job=job_number(self.job), epoch=self.epoch, view=self.view, **given)

    def hello(self, *, rank: int = 0, world_size: int = 1, rule: dict[str, Any] | None = None, **body: Any) -> Any:
        """Say HELLO as a worker; remembers rank, incarnation and epoch of the WELCOME."""
        full = {
            "job": self.job,
            "run": "",
            "nonce": self.nonce,
            "rank": rank,
            "world_size": world_size,
            "rule": rule or APPLY,
            "host": "test",
            "pid": os.getpid(),
            **body,
        }
        answer = self.request("HELLO", worker=NOBODY, incarnation=0, body=full)
        if answer is not None and answer.type.name == "WELCOME":
            self.rank, self.incarnation, self.epoch = answer.worker, answer.incarnation, answer.epoch
            registered = {"registration": answer.body.get("registration"), "key": answer.body.get("key")}
            self.proof = {"job": self.job, "rule": full["rule"], **registered, "place": [0, 0, 1]}
        return answer

    def enter(self, **hello: Any) -> Any:
        """HELLO to a job that is open, and RESUME under the view that has this worker; RESUMED."""
        welcome = self.hello(**hello)
        assert welcome.body["state"] in ("ready", "join"), welcome
        return self.resume()

    def resume(self) -> Any:
        """Await a view, and say RESUME; RESUMED."""
        until_s = time.monotonic() + ANSWER_S
        while not self.view:
            message = self._next(max(0.0, until_s - time.monotonic()))
            assert message is not None, "no view came"
            assert self._is_of_views(message), message
        resumed = self.request("RESUME", body={**self.proof, "open": []})
        assert resumed.type.name == "RESUMED", resumed
        return resumed

    def make_job(self, values: Any) -> None:
        """HELLO as rank 0 of one, REGISTER one chunk, CONFIGURE plain SGD, COMMIT: a job that is open, under a view."""
        welcome = self.hello()
        assert welcome.body["state"] == "initialise", welcome
        registration = welcome.body["registration"]
        resumed = self.request("RESUME", body=self.proof)
        assert resumed.type.name == "RESUMED", resumed
        numel = values.numel()
        segments = [["weight", [numel], [1], 0, numel]]
        body = {"kind": "parameter", "segments": segments}
        registered = self.request("REGISTER", key=0, payload=values, body=body)
        assert registered.type.name == "OK", registered
        runs = {"optimizer": "SGD", "groups": [{**SGD, "lr": 1.0}], "runs": [[0, numel, 0]]}
        configured = self.request("CONFIGURE", key=0, body=runs)
        assert configured.type.name == "OK", configured
        commit = {"what": "registered", "registration": registration, "servers": ["s"], "epochs": [self.epoch]}
        committed = self.request("COMMIT", body={**commit, "chunks": [1]})
        assert committed.type.name == "OK", committed
        self.resume()

    def leave(self) -> Any:
        """Say LEAVE; the answer."""
        return self.request("LEAVE", body={"completed": 0})
