"""Reports which ranks keep a wait from ending; never makes the wait fail.

A rank that takes a branch the others do not take, or whose data loader hangs, leaves the others in a collective until
its deadline, ten minutes later. So each wait is noted when it begins and when it ends. One daemon thread looks twice a
second for a wait that has lasted ``PSENGINE_STALL_S``, asks the other ranks through the rendezvous store where they
wait (``collectives/liveness.py``; such a thread of each waiting rank answers), and logs the answers::

    rank 0   wait ──────────────── 30 s: who is where? ── 6 s ── WARNING ... 60 s ... WARNING ... INFO it ended
    rank 1   (sleeps; does not answer)
    rank 2   wait ──────────────────────── "here" ───────────────
    rank 3   waits for a server ────────── "there" ──────────────

Of the ranks that wait for one operation the lowest reports.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from psengine.environment.variables import read_variable
from psengine.errors import EnvironmentVariableError
from psengine.tracing.observers import observing

logger = logging.getLogger(__name__)

DEFAULT_STALL_S = 30.0
TICK_S = 0.5
# A rank that asks collects answers for a fifth of the time after which it reports, within these limits: over a link
# that data fills, or from a busy machine, they take seconds.
SHORTEST_GRACE_S, LONGEST_GRACE_S = 1.5, 6.0


def stall_after_s() -> float:
    """Return the seconds after which a wait is reported: PSENGINE_STALL_S, else 30; 0 for never.

    Raises:
        EnvironmentVariableError: the variable is no number.
    """
    try:
        return max(0.0, float(read_variable("PSENGINE_STALL_S") or DEFAULT_STALL_S))
    except ValueError as error:
        raise EnvironmentVariableError(
            f"PSENGINE_STALL_S is after how many seconds a wait is reported (expected a number, 0 for never: {error})."
            f" Fix: leave it out for {DEFAULT_STALL_S:g}."
        ) from error


class PendingOperations(Protocol):
    """How the ranks of a group tell each other where they wait; see ``collectives/liveness.py``."""

    rank: int
    world_size: int

    def ask(self) -> int: ...
    def answer(self, position: str, answered: int) -> int: ...
    def answers(self, question: int) -> Mapping[int, str]: ...
    def describe(self, rank: int) -> str: ...


# The ranks that have not begun the operation this rank waits for; None where the transport does not know.
LateRanks = Callable[[], Sequence[int]] | None


@dataclass(eq=False)
class Wait:
    """One rank's wait for one operation; every small all-reduce that has to sleep makes one."""

    operations: PendingOperations
    position: str
    report_s: float  # its length when it is reported next: twice as long each time
    late_ranks: LateRanks
    is_at_servers: bool = False  # for a server's answer, which the client reports
    since_s: float = field(default_factory=time.monotonic)
    asked_s: float = 0.0  # when the other ranks were asked; 0: no report is being made
    question: int = 0  # 0: the store has not taken it
    answered: int = 0  # the question that was answered last
    is_reported: bool = False


class StallInspector:
    """Watches the waits of this process; there is one, ``inspector``. Its thread starts with the first wait.

    Attributes:
        reported_stalls: reports so far.
    """

    def __init__(self) -> None:
        self._waits: set[Wait] = set()
        # Of this process's groups.
        self._operations: weakref.WeakSet[PendingOperations] = weakref.WeakSet()
        self.reported_stalls = 0
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._starting = threading.Lock()

    @contextmanager
    def watch(
        self, operations: PendingOperations | None, position: str, after_s: float, late_ranks: LateRanks = None
    ) -> Iterator[None]:
        """Inside, this thread waits for the operation ``position``.

        Args:
            operations: how to ask the other ranks; None where there is no store, and nothing is watched.
            position: the operation's name and number, the same on every rank.
            after_s: the length of the wait when it is reported first; 0 never.
            late_ranks: see ``LateRanks``.
        """
        if operations is None:
            yield
            return
        wait = Wait(operations, position, after_s or math.inf, late_ranks)
        try:
            with self._noted(wait):
                yield
        finally:
            if wait.is_reported:
                waited_s = time.monotonic() - wait.since_s
                logger.info("rank %d no longer waits for %s; it took %.0f s", operations.rank, position, waited_s)

    @contextmanager
    def watch_server(self, describe: Callable[[], str]) -> Iterator[None]:
        """Inside, this thread waits for a parameter server's answer: ranks that ask are told so."""
        operations = next(iter(self._operations), None)
        if operations is None:
            yield
            return
        with self._noted(Wait(operations, describe(), math.inf, None, is_at_servers=True)):
            yield

    def add_group(self, operations: PendingOperations) -> None:
        """Answer the ranks of one more group that ask where this process waits."""
        self._operations.add(operations)

    def waited_s(self) -> float:
        """For how long this process has waited for other ranks; 0 where it does not."""
        since = [wait.since_s for wait in tuple(self._waits) if not wait.is_at_servers]
        return time.monotonic() - min(since) if since else 0.0

    @contextmanager
    def _noted(self, wait: Wait) -> Iterator[None]:
        self._waits.add(wait)
        if self._thread is None:
            self._start()
        try:
            yield
        finally:
            self._waits.discard(wait)

    @observing("the report of waits for other ranks")  # no memory for a thread, or the interpreter is about to end
    def _start(self) -> None:
        with self._starting:
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name="psengine-stall-inspector", daemon=True)
            self._thread.start()
            # A thread in a store's native code when the interpreter ends would abort the process. Called in turn from
            # the last to the first.
            atexit.register(self._thread.join, 2 * TICK_S)
            atexit.register(self._stop.set)

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            for wait in tuple(self._waits):
                now_s = time.monotonic()
                if now_s - wait.since_s < TICK_S:
                    continue  # too short to answer questions in
                with contextlib.suppress(Exception):  # the store may be gone
                    wait.answered = wait.operations.answer(wait.position, wait.answered)
                with contextlib.suppress(Exception):  # this rank still reports what it knows
                    self._ask_or_report(wait, now_s)

    def _ask_or_report(self, wait: Wait, now_s: float) -> None:
        waited_s = now_s - wait.since_s
        grace_s = min(max(SHORTEST_GRACE_S, wait.report_s / 5), LONGEST_GRACE_S)
        if wait.asked_s == 0 and waited_s >= wait.report_s:
            wait.asked_s, wait.question = now_s, 0
            wait.question = wait.operations.ask()
        elif wait.asked_s != 0 and now_s - wait.asked_s >= grace_s:
            wait.asked_s = 0.0
            while waited_s >= wait.report_s:
                wait.report_s *= 2
            answers: Mapping[int, str] | None = None
            if wait.question > 0:
                with contextlib.suppress(Exception):
                    answers = wait.operations.answers(wait.question)
            text = _describe(wait, waited_s, answers)
            others = [rank for rank, position in (answers or {}).items() if position == wait.position]
            if wait in self._waits and wait.operations.rank <= min(others, default=wait.operations.rank):
                wait.is_reported = True
                self.reported_stalls += 1
                logger.warning("%s", text)


def _describe(wait: Wait, waited_s: float, answers: Mapping[int, str] | None) -> str:
    """Say which ranks are missing, where they are, and what to do; ``answers`` None: they could not be asked."""
    operations, late = wait.operations, wait.late_ranks and wait.late_ranks()
    places = []
    for rank in range(operations.world_size):
        position = (answers or {}).get(rank)
        if rank == operations.rank or position == wait.position:
            continue
        # A rank that says nothing, but has begun the operation, computes.
        if position is not None or (answers is not None if late is None else rank in late):
            place = operations.describe(rank)
            if position is not None:
                place += f", which waits for another: {position}"
            elif answers is not None:
                place += ", which is not waiting in any psengine operation"
            places.append(place)
    said = [f"rank {operations.rank} of {operations.world_size} has waited {waited_s:.0f} s for {wait.position}."]
    if places:
        said.append(
            f"Missing: {'; '.join(places)}. Look there for a branch that only some ranks take, fewer batches"
            f" (model.join()), or data loading that is stuck (py-spy dump --pid PROCESS shows the line)."
        )
    elif answers is not None:
        said.append("No rank is known to be missing, so look at the network between them.")
    if answers is None:
        said.append("The rendezvous store does not answer, so nobody could be asked where it waits.")
    return " ".join([*said, "This is no error yet."])


inspector = StallInspector()
if hasattr(os, "register_at_fork"):  # not on Windows
    # The parent's waits are not the child's, nor is the thread.
    os.register_at_fork(after_in_child=inspector.__init__)  # type: ignore[misc]
