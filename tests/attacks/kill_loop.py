"""Servers and workers killed at random moments, again and again, and an account of every update.

    try    workers push ── SIGKILL of a server, or of a worker, at a random moment ── it is started again
           ── all workers take a step ── they pause ── what they had acknowledged, what is there, what was reported

Worker r pushes a one in element r of every chunk, and servers subtract it (SGD with rate 1), so that each element of
the weights counts one worker's updates: those that are there are read, not inferred. ``benchmarks/faults/run.py``
prints a table of it.

Servers with a follower each (``run_failover``) are killed the same way. What they acknowledge has to be there, and who
leads is asked all the time.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch
from support.fault_workers import Reports, Worker, WorkerProcesses, worker_processes
from support.server_process import ServerProcess, running_server
from support.shard_world import APPLY, AVERAGE, SGD, spec
from support.waiting import eventually
from support.worker_sessions import entered

from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.worker_session import WorkerSession, wait_all

WORKERS = 3
CHUNKS = 8
ELEMENTS = 2048  # of a chunk, the first of which count: what is on its way is more than the kernel's buffers hold
SERVERS = 2
SHARDS = 2  # of each
LEASE_S = 4.0  # which a server that starts again waits for the workers that it does not know
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
        two_leaders: looks at a server that led although another one led under its term, or a higher one, before.
        takeovers_s: of each kill of a leader, until every worker had a push acknowledged.
    """

    tries: int = 0
    survived: int = 0
    lost: int = 0
    unreported: int = 0
    uncounted: int = 0
    doubled: int = 0
    two_leaders: int = 0
    takeovers_s: list[float] = field(default_factory=list, compare=False)


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


def role(server: ServerProcess) -> str:
    """What one of a pair is; "" for a moment between two of its lives."""
    replica = server.status()["replica"]
    return replica["role"] if replica else ""


class Pairs:
    """The job's servers with a follower each. Whoever was killed is started again as the follower of the other one.

    Attributes:
        members: of each pair, its two servers.
        two_leaders: see ``Counters``.
    """

    def __init__(self, context: ExitStack, options: Callable[[int, int], dict[str, Any]], count: int = SERVERS) -> None:
        directory = context.enter_context(tempfile.TemporaryDirectory(prefix="psengine-pairs-"))
        self._context = context
        self._options = [
            [
                {"bind": f"ipc://{directory}/{number}{side}", "shards": SHARDS, "lease_s": 10.0}
                | {"election": f"launcher={directory}/{number}", **options(number, side)}
                for side in range(2)
            ]
            for number in range(count)
        ]
        self.addresses = tuple("|".join(one["bind"] for one in pair) for pair in self._options)
        self.two_leaders = 0
        self.members: list[list[ServerProcess]] = [[] for _ in range(count)]
        for number, side in itertools.product(range(count), range(2)):
            self.members[number].append(self._started(number, side))
        for number in range(count):
            self.await_sync(number)
        self._is_over = threading.Event()
        watch = threading.Thread(target=self._watch, daemon=True)
        watch.start()
        context.callback(watch.join, 20.0)
        context.callback(self._is_over.set)

    @property
    def running(self) -> list[ServerProcess]:
        """Of each pair, who leads."""
        return [self.members[number][self.leader(number)] for number in range(len(self.members))]

    def leader(self, number: int) -> int:
        """Which of a pair leads."""

        def found() -> list[int]:
            roles = [role(server) if server.is_alive else "" for server in self.members[number]]
            return [side for side in range(2) if roles[side] == "leading"]

        return eventually(found, "a leader")[0]

    def await_sync(self, number: int) -> None:
        """Until the follower of a pair may take over."""
        server = self.members[number][self.leader(number)]
        try:
            eventually(lambda: server.status()["replica"]["is_in_sync"], "a follower in sync")
        except AssertionError as error:
            found = [one.status() | {"shards": (), "jobs": ()} for one in self.members[number] if one.is_alive]
            raise AssertionError(f"{error}\n{found[0]}\n{found[1:]}") from error

    def start(self, number: int, side: int) -> None:
        """Start one again that was killed."""
        self.members[number][side] = self._started(number, side)

    def _started(self, number: int, side: int) -> ServerProcess:
        follow = {"follow": self._options[number][1 - side]["bind"]} if self.members[number] else {}
        return self._context.enter_context(running_server(**self._options[number][side], **follow))

    def _watch(self) -> None:
        """Look at one server after the other: who is seen to lead leads after all that was seen before."""
        newest = [(0, "")] * len(self.members)
        while not self._is_over.wait(0.02):
            for number, server in [(number, server) for number, pair in enumerate(self.members) for server in pair]:
                with suppress(OSError, ValueError, HTTPException):  # it is dead
                    replica = (status := server.status())["replica"]
                    if replica and replica["role"] == "leading":
                        found = replica["term"], status["addresses"][0]
                        is_second = found[0] < newest[number][0] or found[0] == newest[number][0] != 0
                        self.two_leaders += is_second and found != newest[number]
                        newest[number] = max(newest[number], found)


def enter(addresses: Sequence[str], rule: dict[str, Any], workers: int) -> tuple[WorkerSession, int]:
    """This process's session as worker ``PSENGINE_WORKER``, and that rank."""
    rank = int(os.environ["PSENGINE_WORKER"])
    specs = [spec(key, ELEMENTS) for key in range(CHUNKS)]
    return entered(addresses, rank, specs, rule=rule, world_size=workers, timeout_s=PATIENCE_S), rank


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


def push_for_ever(reports: Reports, addresses: Sequence[str], rule: dict[str, Any], workers: int) -> None:
    """Step until told to "pause", which is answered by what was acknowledged, and on with "go"; "end" leaves."""
    losses = _LossLog()
    logging.getLogger("psengine.parameter_server.client").addHandler(losses)
    session, rank = enter(addresses, rule, workers)
    body = {"optimizer": "SGD", "groups": [{**SGD, "lr": 1.0}], "runs": [[0, ELEMENTS, 0]]}
    wait_all([session.configure(key, body) for key in range(CHUNKS)])
    gradient = torch.zeros(ELEMENTS)
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


def average_for_ever(reports: Reports, addresses: Sequence[str], rule: dict[str, Any], workers: int) -> None:
    """Step, and look at each average: of this step, and of every worker once."""
    session, rank = enter(addresses, rule, workers)
    averages = [torch.empty(ELEMENTS) for _ in range(CHUNKS)]
    for step in itertools.count(1):
        pushed = torch.full((ELEMENTS,), step % 1000 + 1.0)
        wait_all([session.push(key, pushed * (rank + 1), [average]) for key, average in enumerate(averages)])
        for average in averages:
            torch.testing.assert_close(average, pushed * (workers + 1) / 2)
        reports.say("step", step)


def last_step(worker: Worker) -> int:
    """The last step that it said it took."""
    worker.drain()
    return max((value for said, value, _ in worker.heard if said == "step"), default=0)


def paused(worker: Worker) -> list[Any]:
    """What it said each time it paused."""
    worker.drain()
    return [value for said, value, _ in worker.heard if said == "paused"]


class AsyncTrial:
    """Servers, and workers that push.

    ``kill_server`` and ``kill_worker`` are one try each; ``end``, called with the server, is how it ends.
    """

    def __init__(
        self,
        context: ExitStack,
        servers: Any,
        chooser: random.Random,
        end: Callable[[ServerProcess], None] = ServerProcess.kill,
        rule: dict[str, Any] = APPLY,
        workers: int = WORKERS,
    ) -> None:
        self.counters = Counters()
        self._servers, self._chooser, self._end, self._rule = servers, chooser, end, rule
        self._members: WorkerProcesses = context.enter_context(worker_processes())
        self._workers = [self._start(rank, workers) for rank in range(workers)]
        for worker in self._workers:
            worker.wait_for("step")
        # Of the lives of a rank that were killed: what is there of them.
        self._of_the_dead = [0] * workers
        self._lost = [0] * workers
        self._await_generation()
        self.await_steps()  # which no snapshot has, unless it is one of an interval

    def _start(self, rank: int, workers: int = WORKERS) -> Worker:
        program = average_for_ever if self._rule is AVERAGE else push_for_ever
        return self._members.start(program, self._servers.addresses, self._rule, workers, rank=rank)

    def _await_generation(self) -> None:
        """Ask each server that keeps any for a snapshot, until one that began after now is durable."""
        if self._servers.running[0].status()["snapshot"] is not None:
            with WorkerSession(SessionOptions(addresses=self._servers.addresses, job="job")) as reader:
                ask = functools.partial(reader.administer, {"action": "snapshot"})
                eventually(lambda: all("Durable" in one["text"] for one in ask()), "a snapshot")

    def _pause(self) -> list[tuple[int, int]]:
        before = [len(paused(worker)) for worker in self._workers]
        for worker in self._workers:
            worker.go("pause")

        def are_all_paused() -> bool:
            failed = [worker.story() for worker in self._workers if worker.has_said("failed")]
            assert not failed, failed
            return all(len(paused(one)) > count for one, count in zip(self._workers, before, strict=True))

        eventually(are_all_paused, "the pause of all", interval_s=0.005)
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
        return [[round(-value[rank].item()) for value in values] for rank in range(len(self._lost))]  # type: ignore[index]

    def account(self, counted_before: int = 0) -> None:
        """What was acknowledged is there, and all go on."""
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

    def steps(self) -> list[int]:
        """Of each worker the last step that it said it took."""
        return [last_step(worker) for worker in self._workers]

    def await_steps(self, since: Sequence[int] | None = None) -> float:
        """When every worker had taken two more: the first of them may have been all but done."""
        steps = zip(self._workers, self.steps() if since is None else since, strict=True)
        return max(worker.wait_for("step", at_least=step + 2)[1] for worker, step in steps)

    def _run_for_a_while(self) -> None:
        time.sleep(self._chooser.uniform(0.0, 0.4))
        self.counters.tries += 1

    def kill_server(self) -> None:
        """One try."""
        self._run_for_a_while()
        number = self._chooser.randrange(len(self._servers.running))
        counted = self._counted() if number else 0
        self._servers.kill(number, self._end)
        self.await_steps()
        self.account(counted)

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
        self.account(self._counted())


def servers_of(
    directory: Path, tier: str, count: int = SERVERS, snapshot_interval_s: float = 0.15
) -> Callable[[ExitStack], Servers]:
    """Servers that keep what ``tier`` says in ``directory``."""
    kept = {"snapshot_interval_s": snapshot_interval_s, "durability": tier}
    return lambda context: Servers(context, lambda number: kept | {"snapshot_dir": directory / f"kept-{number}"}, count)


def run_async(
    tries: int,
    seed: int,
    worker_share: float = 0.3,
    tier: str = "snapshot",
    most_s: float = float("inf"),
    max_staleness: int | None = None,
    snapshot_interval_s: float = 0.15,
) -> Counters:
    """``tries`` kills of servers, whose durability is ``tier``, and workers under "async"; fewer in ``most_s``."""
    chooser = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="psengine-kill-") as directory, ExitStack() as context:
        servers = servers_of(Path(directory), tier, snapshot_interval_s=snapshot_interval_s)(context)
        trial = AsyncTrial(context, servers, chooser, rule=APPLY | {"max_staleness": max_staleness})
        for _ in until(most_s, range(tries)):
            if chooser.random() < worker_share:
                trial.kill_worker()
            else:
                trial.kill_server()
        return trial.counters


# ---- servers with a follower -----------------------------------------------------------------------------------------


class FailoverTrial(AsyncTrial):
    """``strike`` kills a leader, a follower, or both in turn; under "log+replica" also both at about the same time."""

    def __init__(self, context: ExitStack, pairs: Pairs, chooser: random.Random, tier: str, **options: Any) -> None:
        super().__init__(context, pairs, chooser, **options)
        self._pairs = pairs
        self._kinds = [self._leader, self._follower, self._in_turn, *([self._both] if "log" in tier else [])]

    def strike(self) -> None:
        """One try, or two."""
        number = self._chooser.randrange(len(self._pairs.members))
        self._pairs.await_sync(number)
        self._chooser.choice(self._kinds)(number, self._pairs.leader(number))
        if self._rule is AVERAGE:
            self.counters.survived += 1
        else:
            self.account()
        self.counters.two_leaders = self._pairs.two_leaders

    def _kill(self, number: int, *sides: int, within_s: float = 0.0) -> float:
        """Seconds until every worker had a push acknowledged."""
        self._run_for_a_while()
        began_s = time.monotonic()
        for side in sides:
            self._end(self._pairs.members[number][side])
            time.sleep(self._chooser.uniform(0.0, within_s))
        for server in self._pairs.members[number]:
            if server.is_alive:
                server.signal(signal.SIGCONT)
        reached = self.steps()
        for side in sides if len(sides) > 1 else ():
            self._pairs.start(number, side)
        went_on_s = self.await_steps(reached)
        if len(sides) == 1:
            self._pairs.start(number, sides[0])
        return went_on_s - began_s

    def _leader(self, number: int, leader: int) -> None:
        if self._chooser.random() < 0.5:  # what is on its way then is not at the follower, and never comes there
            self._pairs.members[number][1 - leader].signal(signal.SIGSTOP)
        self.counters.takeovers_s.append(self._kill(number, leader))

    def _follower(self, number: int, leader: int) -> None:
        self._kill(number, 1 - leader)

    def _in_turn(self, number: int, leader: int) -> None:
        self._leader(number, leader)
        self._pairs.await_sync(number)
        self.counters.survived += 1
        self._leader(number, 1 - leader)

    def _both(self, number: int, leader: int) -> None:
        self._kill(number, *self._chooser.sample([0, 1], 2), within_s=2.0)


def run_failover(
    tries: int,
    seed: int,
    tier: str,
    *,
    workers: int = WORKERS,
    rule: dict[str, Any] = APPLY,
    election: Callable[[int], str] | None = None,
    most_s: float = float("inf"),
) -> Counters:
    """``tries`` kills, or one more, of servers with a follower each; fewer in ``most_s``."""
    chooser = random.Random(seed)

    def options(number: int, side: int) -> dict[str, Any]:
        kept = {"snapshot_dir": directory / f"{number}{side}", "snapshot_interval_s": 0.15} if "log" in tier else {}
        return {"durability": tier} | kept | ({"election": election(number)} if election else {})

    with tempfile.TemporaryDirectory(prefix="psengine-kill-") as folder, ExitStack() as context:
        directory = Path(folder)
        trial = FailoverTrial(context, Pairs(context, options), chooser, tier, rule=rule, workers=workers)
        for _ in until(most_s, itertools.count()):
            if trial.counters.tries >= tries:
                break
            trial.strike()
        return trial.counters
