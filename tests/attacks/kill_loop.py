"""Servers and workers killed at random moments, again and again, and an account of every update.

    try    workers push ── SIGKILL of a server, or of a worker, at a random moment ── it is started again
           ── all workers take a step ── they pause ── what they had acknowledged, what is there, what was reported

Worker r pushes a one in element r of every chunk, and servers subtract it (SGD with rate 1), so that each element of
the weights counts one worker's updates: those that are there are read, not inferred. ``benchmarks/faults/run.py``
prints a table of it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.fault_workers import Reports, Worker, WorkerProcesses, worker_processes
from support.server_process import ServerProcess, running_server
from support.shard_world import APPLY, SGD, spec
from support.waiting import eventually
from support.worker_sessions import entered

from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.worker_session import WorkerSession, wait_all

WORKERS = 3
CHUNKS = 8
SERVERS = 2
SHARDS = 2  # of each
LEASE_S = 1.0
PATIENCE_S = 30.0
# What is told of a loss is the difference of two versions. Chunks differ by the steps that are under way, and workers
# by what they have heard.
UNTOLD = 2 * WORKERS * CHUNKS


@dataclass
class Counters:
    """What came of it; updates are pushes of a chunk.

    Attributes:
        tries: kills.
        survived: after which everybody who lived went on to the end.
        lost: acknowledged updates that were gone afterwards.
        unreported: how many of them no worker's log had, but for ``UNTOLD``.
        uncounted: by how much the coordinator's own count was too low, likewise.
        doubled: updates that were there more often than they were pushed.
    """

    tries: int = 0
    survived: int = 0
    lost: int = 0
    unreported: int = 0
    uncounted: int = 0
    doubled: int = 0


class Servers:
    """The job's servers, the lead first, each at an address that it keeps."""

    def __init__(self, context: ExitStack, options: Callable[[int], dict[str, Any]], count: int = SERVERS) -> None:
        directory = context.enter_context(tempfile.TemporaryDirectory(prefix="psengine-kill-"))
        self._context = context
        self._options = [
            {"bind": f"ipc://{directory}/{number}", "shards": SHARDS, "lease_s": LEASE_S, **options(number)}
            for number in range(count)
        ]
        self.addresses: tuple[str, ...] = tuple(one["bind"] for one in self._options)
        self.running: list[ServerProcess] = []
        for one in self._options:
            self.running.append(context.enter_context(running_server(**one)))

    def kill(self, number: int, end: Callable[[ServerProcess], None] = ServerProcess.kill) -> None:
        """``end`` one, and start it again."""
        end(self.running[number])
        self.running[number] = self._context.enter_context(running_server(**self._options[number]))


def enter(addresses: Sequence[str], rule: dict[str, Any]) -> tuple[WorkerSession, int]:
    """This process's session as worker ``PSENGINE_WORKER``, and that rank."""
    rank = int(os.environ["PSENGINE_WORKER"])
    specs = [spec(key, WORKERS) for key in range(CHUNKS)]  # one element for each worker
    return entered(addresses, rank, specs, rule=rule, world_size=WORKERS, timeout_s=PATIENCE_S), rank


def until(most_s: float, numbers: Iterable[int]) -> Iterator[int]:
    """``numbers``, as long as ``most_s`` have not passed."""
    end_s = time.monotonic() + most_s
    return itertools.takewhile(lambda _: time.monotonic() < end_s, numbers)


class _LossLog(logging.Handler):
    """Keeps the most updates of a chunk that the client says are lost."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        if "updates of each chunk are lost" in record.msg:
            self.lost = max(self.lost, int(record.args[-1]))  # type: ignore[index,arg-type]

    def taken(self) -> int:
        """Since the last call."""
        lost, self.lost = self.lost, 0
        return lost


def push_for_ever(reports: Reports, addresses: Sequence[str], rule: dict[str, Any]) -> None:
    """Step until told to "pause", which is answered by what was acknowledged, and on with "go"; "end" leaves."""
    losses = _LossLog()
    logging.getLogger("psengine.parameter_server.client").addHandler(losses)
    session, rank = enter(addresses, rule)
    body = {"optimizer": "SGD", "groups": [{**SGD, "lr": 1.0}], "runs": [[0, WORKERS, 0]]}
    wait_all([session.configure(key, body) for key in range(CHUNKS)])
    gradient = torch.zeros(WORKERS)
    gradient[rank] = 1.0
    acknowledged = step = 0
    reports.say("begun")
    while (order := reports.told()) != "end":
        if order == "pause":
            reports.say("paused", (acknowledged, losses.taken()))
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


def _has_generation(server: ServerProcess, least: int) -> bool:
    return (server.status()["snapshot"]["generation"] or 0) >= least


class AsyncTrial:
    """Servers that keep what ``tier`` says in ``directory``, and workers that push.

    ``kill_server`` and ``kill_worker`` are one try each; ``end``, called with the server, is how it ends.
    """

    def __init__(
        self,
        context: ExitStack,
        directory: Path,
        chooser: random.Random,
        tier: str,
        end: Callable[[ServerProcess], None] = ServerProcess.kill,
        servers: int = SERVERS,
        max_staleness: int | None = None,
    ) -> None:
        self.counters = Counters()
        self._chooser = chooser
        self._end, self._rule = end, APPLY | {"max_staleness": max_staleness}
        kept = {"snapshot_interval_s": 0.15, "durability": tier}
        self._servers = Servers(
            context.enter_context(ExitStack()),
            lambda number: kept | {"snapshot_dir": directory / f"kept-{number}"},
            servers,
        )
        self._members: WorkerProcesses = context.enter_context(worker_processes())
        self._workers = [self._start(rank) for rank in range(WORKERS)]
        for worker in self._workers:
            worker.wait_for("step")
        # Of the lives of a rank that were killed: what is there of them.
        self._of_the_dead = [0] * WORKERS
        self._lost = [0] * WORKERS
        self._await_generation()

    def _start(self, rank: int) -> Worker:
        return self._members.start(push_for_ever, self._servers.addresses, self._rule, rank=rank)

    def _await_generation(self) -> None:
        """Until a snapshot that began after now is durable at each server."""
        for server in self._servers.running:
            before = server.status()["snapshot"]["generation"] or 0
            is_durable = functools.partial(_has_generation, server, before + 2)
            eventually(is_durable, "a snapshot", timeout_s=PATIENCE_S)

    def _pause(self) -> list[tuple[int, int]]:
        before = [len(paused(worker)) for worker in self._workers]
        for worker in self._workers:
            worker.go("pause")

        def are_all_paused() -> bool:
            failed = [worker.story() for worker in self._workers if worker.has_said("failed")]
            assert not failed, failed
            return all(len(paused(one)) > count for one, count in zip(self._workers, before, strict=True))

        eventually(are_all_paused, "the pause of all", timeout_s=PATIENCE_S, interval_s=0.005)
        return [paused(worker)[count] for worker, count in zip(self._workers, before, strict=True)]

    def _resume(self) -> None:
        for worker in self._workers:
            worker.go("go")

    def _present(self) -> list[list[int]]:
        """By rank and chunk, how many of its updates are in the weights."""
        options = SessionOptions(addresses=self._servers.addresses, job="job")
        with WorkerSession(options) as reader:
            keys = [one.key for one in reader.layout()]
            values = [reader.pull(key).wait().payload for key in keys]
        assert all(value is not None for value in values)
        return [[round(-value[rank].item()) for value in values] for rank in range(WORKERS)]  # type: ignore[index]

    def _account(self, counted_before: int = 0) -> None:
        answers = self._pause()
        present = self._present()
        lost_now = 0
        for rank, (acknowledged, _) in enumerate(answers):
            there = sum(present[rank]) - self._of_the_dead[rank]
            short = acknowledged - there - self._lost[rank]
            self.counters.doubled += max(0, -short)
            self._lost[rank] += short
            lost_now += short
        self.counters.lost += lost_now
        for counter, of_each_chunk in (
            ("unreported", max(told for _, told in answers)),
            ("uncounted", self._counted() - counted_before),
        ):
            missed = max(0, lost_now - of_each_chunk * CHUNKS // len(self._servers.running) - UNTOLD)
            setattr(self.counters, counter, getattr(self.counters, counter) + missed)
        self._resume()
        for worker in self._workers:
            worker.wait_for("step", at_least=last_step(worker) + 1)
        self.counters.survived += 1

    def _counted(self) -> int:
        return int(self._servers.running[0].coordinated("job")["lost_updates"])

    def _run_for_a_while(self) -> None:
        time.sleep(self._chooser.uniform(0.0, 0.4))
        self.counters.tries += 1

    def kill_server(self) -> None:
        """One try."""
        self._run_for_a_while()
        number = self._chooser.randrange(len(self._servers.running))
        counted = self._counted() if number else 0
        self._servers.kill(number, self._end)
        for worker in self._workers:
            worker.wait_for("step", at_least=last_step(worker) + 2)
        self._account(counted)

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
        self._of_the_dead[rank], self._lost[rank] = sum(there), 0
        self._resume()
        self._workers.insert(rank, self._start(rank))
        self._workers[rank].wait_for("step")
        self._await_generation()
        self._account(self._counted())


def run_async(
    tries: int,
    seed: int,
    worker_share: float = 0.3,
    tier: str = "snapshot",
    most_s: float = float("inf"),
    max_staleness: int | None = None,
) -> Counters:
    """``tries`` kills of servers, whose durability is ``tier``, and workers under "async"; fewer in ``most_s``."""
    chooser = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="psengine-kill-") as directory, ExitStack() as context:
        trial = AsyncTrial(context, Path(directory), chooser, tier, max_staleness=max_staleness)
        for _ in until(most_s, range(tries)):
            if chooser.random() < worker_share:
                trial.kill_worker()
            else:
                trial.kill_server()
        return trial.counters
