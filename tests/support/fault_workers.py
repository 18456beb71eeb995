"""Workers for tests of faults: processes that a test starts, kills, stops and starts again, one by one."""

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from support.process_table import send_signal
from support.processes import forkserver


class WorkerFailedError(AssertionError):
    """A worker ended in a way that the test did not ask for; holds its traceback and its log."""


class Reports:
    """A worker's side of its pipe: it says what it does, and may be told to go on."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def say(self, what: str, value: Any = None) -> None:
        """Tell the test, with the time."""
        self._connection.send_bytes(pickle.dumps((what, value, time.monotonic())))

    def await_go(self, timeout_s: float = 150.0) -> Any:
        """Wait for ``Worker.go``; what it was given."""
        if not self._connection.poll(timeout_s):
            raise TimeoutError("the test never said go")
        return pickle.loads(self._connection.recv_bytes())

    def told(self) -> Any:
        """What ``Worker.go`` was given, if it was called since; else None."""
        return pickle.loads(self._connection.recv_bytes()) if self._connection.poll(0) else None


class Worker:
    """One worker process.

    Attributes:
        pid: of its process.
        log: what it has written to stdout and stderr.
        heard: (what, value, time) of everything it said.
    """

    def __init__(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str], log: Path
    ) -> None:
        self.log = log
        self.log.touch()
        self._connection, remote = forkserver.Pipe(duplex=True)
        self._process = forkserver.Process(
            target=_worker_main, args=(remote, function, arguments, environment, str(log)), daemon=True
        )
        self._process.start()
        remote.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.heard: list[tuple[str, Any, float]] = []
        self._has_ended = False

    def go(self, what: Any = True) -> None:
        """Let it go on."""
        self._connection.send_bytes(pickle.dumps(what))

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.join(timeout=10)

    def exit_code(self, timeout_s: float = 0.0) -> int | None:
        """Negative for a signal; None where it still runs after that time."""
        self._process.join(timeout=timeout_s)
        return self._process.exitcode

    def signal(self, number: int) -> None:
        """Send a signal, such as SIGSTOP."""
        send_signal(self.pid, number)

    def drain(self) -> None:
        """Take in what it has said."""
        try:
            while not self._has_ended and self._connection.poll(0):
                self.heard.append(pickle.loads(self._connection.recv_bytes()))
        except (EOFError, OSError):
            self._has_ended = True

    def wait_for(self, what: str, timeout_s: float = 120.0, at_least: int | None = None) -> tuple[Any, float]:
        """(value, time) of the first report ``what`` (of one whose value is ``at_least`` that)."""
        deadline_s = time.monotonic() + timeout_s
        looked_at = 0
        while True:
            self.drain()
            for said, value, when_s in self.heard[looked_at:]:
                if said == what and (at_least is None or value >= at_least):
                    return value, when_s
                if said == "failed" and what != "failed":
                    raise WorkerFailedError(f"worker {self.pid} failed, awaited {what!r}\n{value}")
            looked_at = len(self.heard)
            if self._has_ended or time.monotonic() > deadline_s:
                ended = "it has ended" if self._has_ended else f"{timeout_s:g} s passed"
                raise WorkerFailedError(f"worker {self.pid} did not say {what!r}: {ended}\n{self.story()}")
            self._connection.poll(0.05)

    def has_said(self, what: str) -> bool:
        """Whether it said that."""
        self.drain()
        return any(said == what for said, _, _ in self.heard)

    def story(self) -> str:
        """Its log, where its threads are if it lives, and its last words."""
        if self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                send_signal(self.pid, signal.SIGUSR2)
            time.sleep(0.2)
        self.drain()
        words = [(said, value if said != "result" else "...") for said, value, _ in self.heard if said != "failed"]
        failures = [value for said, value, _ in self.heard if said == "failed"]
        return "\n".join([str(words[-3:]), self.log.read_text(errors="replace"), *failures])

    def result(self, timeout_s: float = 120.0) -> Any:
        """What its function returned."""
        return self.wait_for("result", timeout_s)[0]

    def end(self) -> None:
        """Whatever it does, it is gone afterwards."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join(timeout=10)
        self._process.close()
        self._connection.close()


class WorkerProcesses:
    """The workers of a test; ended with it."""

    def __init__(self, directory: Path) -> None:
        self.workers: list[Worker] = []
        self._directory = directory

    def start(self, function: Callable[..., Any], *arguments: Any, rank: int | None = None) -> Worker:
        """``function(reports, *arguments)`` in a process of its own, as worker ``rank``."""
        environment = {} if rank is None else {"PSENGINE_WORKER": str(rank)}
        worker = Worker(function, arguments, environment, self._directory / f"{len(self.workers)}.log")
        self.workers.append(worker)
        return worker


def results_of(workers: Sequence[Worker], timeout_s: float = 120.0) -> list[Any]:
    """What their functions returned; the first failure of any ends the wait, and is told with the others'."""
    deadline_s = time.monotonic() + timeout_s
    while not all(worker.has_said("result") for worker in workers):
        is_over = any(worker.has_said("failed") or worker.exit_code() for worker in workers)
        if is_over or time.monotonic() > deadline_s:
            stories = "\n".join(f"--- worker {worker.pid}\n{worker.story()}" for worker in workers)
            raise WorkerFailedError(f"a worker failed, or they still run after {timeout_s:g} s\n{stories}")
        time.sleep(0.02)
    return [worker.result() for worker in workers]


@contextmanager
def worker_processes() -> Iterator[WorkerProcesses]:
    """Workers that all end with this context."""
    with tempfile.TemporaryDirectory(prefix="psengine-workers-") as directory:
        workers = WorkerProcesses(Path(directory))
        try:
            yield workers
        finally:
            for worker in workers.workers:
                worker.end()


def _end_with_parent() -> None:
    """A test process that is killed cannot end its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch(sentinel: int) -> None:
        wait([sentinel])
        os._exit(9)

    threading.Thread(target=watch, args=[parent.sentinel], daemon=True).start()


def _worker_main(
    connection: Any, function: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str], log: str
) -> None:
    _end_with_parent()
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    logging.basicConfig(format="%(asctime)s.%(msecs)03d %(threadName)s %(message)s", datefmt="%H:%M:%S")
    faulthandler.register(signal.SIGUSR2, file=sys.stderr)
    torch.set_num_threads(1)
    reports = Reports(connection)
    code = 0
    try:
        reports.say("result", function(reports, *arguments))
    except BaseException:
        reports.say("failed", traceback.format_exc())
        code = 1
    connection.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def expect_workers(world_size: int) -> None:
    """Let the servers wait for so many workers, as a process group of that size would."""
    from dataclasses import replace

    from psengine.strategies.servers import base as server_strategy
    from psengine.strategies.servers.discovery import meet

    def meet_several(*arguments: Any, **options: Any) -> Any:
        return replace(meet(*arguments, **options), world_size=world_size)

    server_strategy.meet = meet_several  # type: ignore[assignment]
