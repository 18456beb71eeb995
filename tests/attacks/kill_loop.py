"""Servers and workers killed at random moments, again and again, and an account of every update.

    try    workers push ── SIGKILL of the server, or of a worker, at a random moment ── it is started again
           ── all workers take a step ── they pause ── what they had acknowledged, what is there, what was reported

Worker r pushes a one in element r of every chunk, and servers subtract it (SGD with rate 1), so that each element of
the weights counts one worker's updates: those that are there are read, not inferred. ``averaging_kills`` does the same
under "sync-server". ``benchmarks/faults/run.py`` prints a table of it.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from support.fault_workers import Reports, Worker, WorkerFailedError, WorkerProcesses, worker_processes
from support.server_process import APPLY, SGD, ServerProcess, running_server

from psengine.parameter_server.client.options import READER_RULE, SessionOptions
from psengine.parameter_server.client.worker_session import WorkerSession, wait_all
from psengine.protocol.layout import ChunkKind, ChunkSpec, Segment

WORKERS = 3
CHUNKS = 8
SHARDS = 2
LEASE_S = 1.0
PATIENCE_S = 30.0
SNAPSHOTS_S = 90.0  # two of them: each waits 10 s for the steps of a worker that was killed in the middle of one


@dataclass
class Counters:
    """What came of it; updates are pushes of a chunk.

    Attributes:
        tries: kills.
        survived: after which everybody who lived went on to the end.
        lost: acknowledged updates that were gone afterwards.
        unreported: how many of them no worker's log had.
        uncounted: by how much the server's own count was too low.
        doubled: updates that were there more often than they were pushed.
        two_results: averages of one step and chunk that differed between two workers.
    """

    tries: int = 0
    survived: int = 0
    lost: int = 0
    unreported: int = 0
    uncounted: int = 0
    doubled: int = 0
    two_results: int = 0

    def __add__(self, other: Counters) -> Counters:
        mine, its = asdict(self), asdict(other)
        return Counters(**{name: mine[name] + its[name] for name in mine})


def layout() -> list[ChunkSpec]:
    """The chunks: one element for each worker."""
    return [
        ChunkSpec(key, ChunkKind.PARAMETER, torch.float32, WORKERS, (Segment(f"p{key}", (WORKERS,), (1,), 0, WORKERS),))
        for key in range(CHUNKS)
    ]


def enter(address: str, rule: dict[str, Any]) -> tuple[WorkerSession, int]:
    """This process's session as worker ``PSENGINE_WORKER``, and that rank."""
    rank = int(os.environ["PSENGINE_WORKER"])
    options = SessionOptions(
        addresses=(address,), job="job", rule=rule, rank=rank, world_size=WORKERS, timeout_s=PATIENCE_S
    )
    session = WorkerSession(options)
    session.start()
    session.enter(layout(), lambda one: torch.zeros(one.numel))
    return session, rank


def until(most_s: float, numbers: Iterable[int]) -> Iterator[int]:
    """``numbers``, as long as ``most_s`` have not passed."""
    end_s = time.monotonic() + most_s
    return itertools.takewhile(lambda _: time.monotonic() < end_s, numbers)


# ---- async -----------------------------------------------------------------------------------------------------------


class _LossLog(logging.Handler):
    """Adds up what ``psengine.parameter_server.client.recovery`` says that is lost by what this worker knew."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        if "went back to the last snapshot" in record.msg:
            self.lost += int(record.args[1])  # type: ignore[index,arg-type]


def push_for_ever(reports: Reports, address: str) -> None:
    """Step until told to "pause", which is answered by what was acknowledged, and on with "go"; "end" leaves."""
    losses = _LossLog()
    logging.getLogger("psengine.parameter_server.client.recovery").addHandler(losses)
    session, rank = enter(address, APPLY)
    body = {"optimizer": "SGD", "groups": [{**SGD, "lr": 1.0}], "runs": [[0, WORKERS, 0]]}
    wait_all([session.configure(key, body) for key in range(CHUNKS)])
    gradient = torch.zeros(WORKERS)
    gradient[rank] = 1.0
    acknowledged = step = 0
    reports.say("begun")
    while (order := reports.told()) != "end":
        if order == "pause":
            reports.say("paused", (acknowledged, losses.lost))
            if reports.await_go() == "end":
                break
        wait_all([session.push(key, gradient.clone(), []) for key in range(CHUNKS)])
        acknowledged += CHUNKS
        step += 1
        reports.say("step", step)
    session.close()


def last_step(worker: Worker) -> int:
    """The last step that it said it took."""
    worker.drain()
    return max((value for said, value, _ in worker.heard if said == "step"), default=0)


def paused(worker: Worker) -> list[Any]:
    """What it said each time it paused."""
    worker.drain()
    return [value for said, value, _ in worker.heard if said == "paused"]


def next_pause(worker: Worker, before: int) -> Any:
    """What it says in its next pause, after the first ``before``."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        found = paused(worker)
        if len(found) > before:
            return found[before]
        if worker.has_said("failed") or time.monotonic() > deadline_s:
            raise WorkerFailedError(f"worker {worker.pid} did not pause\n{worker.story()}")
        time.sleep(0.005)


class AsyncTrial:
    """A server that keeps what ``tier`` says in ``directory``, and workers that push.

    ``kill_server`` and ``kill_worker`` are one try each; ``end``, called with the server, is how it ends.
    """

    def __init__(
        self,
        context: ExitStack,
        directory: Path,
        chooser: random.Random,
        tier: str,
        end: Callable[[ServerProcess], None] = ServerProcess.kill,
    ) -> None:
        self.counters = Counters()
        self._chooser = chooser
        self._end = end
        self._directory = directory / "snapshots"
        self._address = f"ipc://{context.enter_context(tempfile.TemporaryDirectory(prefix='psengine-kill-'))}/socket"
        self._options = {
            "bind": self._address,
            "shards": SHARDS,
            "lease_s": LEASE_S,
            "snapshot_dir": self._directory,
            "snapshot_interval_s": 0.15,
            "durability": tier,
        }
        self._servers = context.enter_context(ExitStack())
        self._crew: WorkerProcesses = context.enter_context(worker_processes())
        self.server: ServerProcess = self._servers.enter_context(running_server(**self._options))
        self._workers = [self._crew.start(push_for_ever, self._address, rank=rank) for rank in range(WORKERS)]
        for worker in self._workers:
            worker.wait_for("step")
        # Of the lives of a rank that were killed: what is there of them.
        self._of_the_dead = [0] * WORKERS
        self._reported = [0] * WORKERS
        self._lost = [0] * WORKERS
        self._await_generation()

    def _await_generation(self) -> None:
        """Until a snapshot that began after now is durable."""
        before = self.server.status()["snapshot"]["generation"] or 0
        deadline_s = time.monotonic() + SNAPSHOTS_S
        while (self.server.status()["snapshot"]["generation"] or 0) < before + 2:
            if time.monotonic() > deadline_s:
                said = "\n".join(self.server.log().splitlines()[-20:])
                raise AssertionError(f"no snapshot was written: {self.server.status()['snapshot']}\n{said}")
            time.sleep(0.02)

    def _pause(self) -> list[tuple[int, int]]:
        before = [len(paused(worker)) for worker in self._workers]
        for worker in self._workers:
            worker.go("pause")
        return [next_pause(worker, count) for worker, count in zip(self._workers, before, strict=True)]

    def _resume(self) -> None:
        for worker in self._workers:
            worker.go("go")

    def _present(self) -> list[list[int]]:
        """By rank and chunk, how many of its updates are in the weights."""
        options = SessionOptions(addresses=(self._address,), job="job", rule=READER_RULE, role="reader")
        with WorkerSession(options) as reader:
            keys = [one.key for one in reader.layout()]
            values = [reader.pull(key).wait().values for key in keys]
        assert all(value is not None for value in values)
        return [[round(-value[rank].item()) for value in values] for rank in range(WORKERS)]  # type: ignore[index]

    def _account(self, lost_by_server: bool) -> None:
        answers = self._pause()
        present = self._present()
        lost_now = 0
        for rank, (acknowledged, told) in enumerate(answers):
            there = sum(present[rank]) - self._of_the_dead[rank]
            short = acknowledged - there - self._lost[rank]
            self.counters.doubled += max(0, -short)
            # A worker knows at least of its own.
            self.counters.unreported += max(0, short - (told - self._reported[rank]))
            self._lost[rank] += short
            self._reported[rank] = told
            lost_now += short
        self.counters.lost += lost_now
        if lost_by_server:
            deadline_s = time.monotonic() + LEASE_S + 2.0
            while self._counted() < lost_now and time.monotonic() < deadline_s:
                time.sleep(0.05)
            self.counters.uncounted += max(0, lost_now - self._counted())
        self._resume()
        for worker in self._workers:
            worker.wait_for("step", at_least=last_step(worker) + 1)
        self.counters.survived += 1

    def _counted(self) -> int:
        return sum(part["lost_updates"] for part in self.server.job("job"))

    def _run_for_a_while(self) -> None:
        time.sleep(self._chooser.uniform(0.0, 0.4))
        self.counters.tries += 1

    def kill_server(self) -> None:
        """One try."""
        self._run_for_a_while()
        self._end(self.server)
        self.server = self._servers.enter_context(running_server(**self._options))
        for worker in self._workers:
            worker.wait_for("step", at_least=last_step(worker) + 2)
        self._account(lost_by_server=True)

    def kill_worker(self) -> None:
        """One try; afterwards what is there of the dead one is durable."""
        rank = self._chooser.randrange(WORKERS)
        self._run_for_a_while()
        victim = self._workers[rank]
        victim.kill()
        least = last_step(victim) * CHUNKS
        others = [worker for worker in self._workers if worker is not victim]
        self._workers = others
        self._pause()
        there = self._present()[rank]
        before = self._of_the_dead[rank] + least - self._lost[rank]
        # The step in which it died may have come to any number of chunks.
        self.counters.doubled += max(0, sum(there) - before - CHUNKS)
        self.counters.lost += max(0, before - sum(there))
        self.counters.unreported += max(0, before - sum(there))
        self._of_the_dead[rank], self._lost[rank], self._reported[rank] = sum(there), 0, 0
        self._resume()
        self._workers.insert(rank, self._crew.start(push_for_ever, self._address, rank=rank))
        self._workers[rank].wait_for("step")
        self._await_generation()
        self._account(lost_by_server=False)


def run_async(
    tries: int, seed: int, worker_share: float = 0.3, tier: str = "snapshot", most_s: float = float("inf")
) -> Counters:
    """``tries`` kills of a server, whose durability is ``tier``, and its workers under "async"; fewer in ``most_s``."""
    chooser = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="psengine-kill-") as directory, ExitStack() as context:
        trial = AsyncTrial(context, Path(directory), chooser, tier)
        for _ in until(most_s, range(tries)):
            if chooser.random() < worker_share:
                trial.kill_worker()
            else:
                trial.kill_server()
        return trial.counters


def run_forgetful(tries: int, seed: int, most_s: float = float("inf")) -> Counters:
    """``tries`` kills of a server that keeps nothing: every worker must end with an error that says what is lost."""
    chooser = random.Random(seed)
    counters = Counters()
    for _ in until(most_s, range(tries)):
        with tempfile.TemporaryDirectory(prefix="psengine-kill-") as directory, ExitStack() as context:
            options = {"bind": f"ipc://{directory}/socket", "shards": SHARDS, "lease_s": LEASE_S}
            server = context.enter_context(running_server(**options))
            members = context.enter_context(worker_processes())
            workers = [members.start(push_for_ever, options["bind"], rank=rank) for rank in range(WORKERS)]
            for worker in workers:
                worker.wait_for("step")
            time.sleep(chooser.uniform(0.0, 0.4))
            server.kill()
            context.enter_context(running_server(**options))
            counters.tries += 1
            for worker in workers:
                told = worker.wait_for("failed", PATIENCE_S)[0]
                counters.lost += CHUNKS * last_step(worker)
                counters.unreported += 0 if "are lost" in told else CHUNKS * last_step(worker)
    return counters
