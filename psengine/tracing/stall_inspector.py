"""Reports which ranks keep a wait from ending; never makes the wait fail.

A rank that takes a branch the others do not take, or whose data loader hangs, leaves the others in a collective until
its deadline, ten minutes later. So each wait is noted when it begins and when it ends. One daemon thread looks twice a
second for a wait that has lasted ``PSENGINE_STALL_S``, asks the other ranks through the rendezvous store where they
wait (``collectives/pending_operations.py``; such a thread of each waiting rank answers), and logs the answers::

    rank 0   wait ──────────────── 30 s: who is where? ── 6 s ── WARNING ... 60 s ... WARNING ... INFO it ended
    rank 1   (sleeps; does not answer)
    rank 2   wait ──────────────────────── "here" ───────────────

"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from psengine.environment.variables import read_variable
from psengine.errors import EnvironmentVariableError

logger = logging.getLogger(__name__)

DEFAULT_STALL_S = 30.0
TICK_S = 0.5
# A wait this long makes its rank answer questions. A rank that asks collects answers for a fifth of the time after
# which it reports, within these limits: over a link that data fills, or from a busy machine, they take seconds.
ANSWER_AFTER_S = 0.5
SHORTEST_GRACE_S, LONGEST_GRACE_S = 1.5, 6.0


def stall_after_s() -> float:
    """Return the seconds after which a wait is reported: PSENGINE_STALL_S, else 30; 0 for never.

    Raises:
        EnvironmentVariableError: the variable is no number of seconds.
    """
    text = (read_variable("PSENGINE_STALL_S") or "").strip()
    if not text:
        return DEFAULT_STALL_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise EnvironmentVariableError(
            f"PSENGINE_STALL_S is after how many seconds a wait is reported (expected a number, 0 for never, got"
            f" {text!r}). Fix: leave it out for {DEFAULT_STALL_S:g}."
        )
    return seconds


@dataclass(frozen=True)
class Position:
    """What a rank waits for: the operation's number in its collective, and its name."""

    operation: int
    what: str

    def __str__(self) -> str:
        return f"{self.what}, operation {self.operation}"


class PendingOperations(Protocol):
    """How ranks tell each other where they wait; see ``collectives/pending_operations.py``."""

    def ask(self) -> int: ...
    def latest_question(self) -> int: ...
    def answer(self, question: int, position: Position) -> None: ...
    def answers(self, question: int) -> Mapping[int, Position]: ...
    def describe(self, rank: int) -> str: ...
    def advise(self, ranks: Sequence[int]) -> str: ...


class Watched(Protocol):
    """A collective whose waits are watched."""

    rank: int
    world_size: int

    @property
    def pending_operations(self) -> PendingOperations | None:
        """How to ask the other ranks; None where there is no store."""

    def late_ranks(self) -> tuple[int, ...] | None:
        """The ranks that have not begun the operation this rank waits for; None where the transport does not know."""


class Wait:
    """One rank's wait for one operation; every small all-reduce that has to sleep makes one."""

    def __init__(self, collective: Watched, position: Position, timeout_s: float, after_s: float) -> None:
        self.since_s = time.monotonic()
        self.collective = collective
        self.position = position
        self.timeout_s = timeout_s
        self.report_s = after_s  # its length when it is reported next: twice as long each time
        self.grace_s = min(max(SHORTEST_GRACE_S, after_s / 5), LONGEST_GRACE_S)
        self.asked_s = 0.0  # when the other ranks were asked; 0: no report is being made
        self.is_reported = False
        self.question = 0  # 0: the store has not taken it


class StallInspector:
    """Watches the waits of this process; there is one, ``inspector``. Its thread starts with the first wait.

    Attributes:
        reported_stalls: reports so far.
    """

    def __init__(self) -> None:
        # By thread, which waits for one operation at a time.
        self._waits: dict[int, Wait] = {}
        self.reported_stalls = 0
        # By the ranks' pending operations, the question this rank answered last.
        self._answered: weakref.WeakKeyDictionary[PendingOperations, int] = weakref.WeakKeyDictionary()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._starting = threading.Lock()

    @contextmanager
    def watch(self, collective: Watched, operation: int, what: str, timeout_s: float, after_s: float) -> Iterator[None]:
        """Inside, this thread waits for operation number ``operation``; report it after ``after_s`` s, 0 never."""
        if not after_s:
            yield
            return
        key = threading.get_ident()
        self._waits[key] = Wait(collective, Position(operation, what), timeout_s, after_s)
        if self._thread is None:
            self._start()
        try:
            yield
        finally:
            wait = self._waits.pop(key, None)
            if wait is not None and wait.is_reported:
                waited_s = time.monotonic() - wait.since_s
                logger.info("rank %d no longer waits for %s; it took %.0f s", collective.rank, wait.position, waited_s)

    def _start(self) -> None:
        with self._starting:
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name="psengine-stall-inspector", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # no memory or number for one more, or the interpreter is about to end
                logger.warning("waits for other ranks are not watched (%s)", error)
                return
            # A thread in a store's native code when the interpreter ends would abort the process.
            atexit.register(self._end, self._thread)

    def _end(self, thread: threading.Thread) -> None:
        self._stop.set()
        thread.join(2 * TICK_S)

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            for key, wait in tuple(self._waits.items()):
                now_s = time.monotonic()
                if now_s - wait.since_s < ANSWER_AFTER_S:
                    continue
                for look in (self._answer, self._ask_or_report):
                    try:
                        look(key, wait, now_s)
                    except Exception:  # the store may be gone; this rank still reports what it knows
                        logger.debug("rank %d cannot ask the others", wait.collective.rank, exc_info=True)

    def _answer(self, _key: int, wait: Wait, _now_s: float) -> None:
        operations = wait.collective.pending_operations
        if operations is None:
            return
        question = operations.latest_question()
        if question > self._answered.get(operations, 0):
            operations.answer(question, wait.position)
            self._answered[operations] = question

    def _ask_or_report(self, key: int, wait: Wait, now_s: float) -> None:
        waited_s, operations = now_s - wait.since_s, wait.collective.pending_operations
        if wait.asked_s == 0 and waited_s >= wait.report_s:
            wait.asked_s, wait.question = now_s, 0
            if operations is not None:
                wait.question = operations.ask()
        elif wait.asked_s != 0 and now_s - wait.asked_s >= wait.grace_s:
            wait.asked_s = 0.0
            while waited_s >= wait.report_s:
                wait.report_s *= 2
            answers: Mapping[int, Position] | None = None
            if operations is not None and wait.question > 0:
                try:
                    answers = operations.answers(wait.question)
                except Exception:  # the store is gone
                    logger.debug("rank %d cannot hear the others", wait.collective.rank, exc_info=True)
            text = _describe(wait, waited_s, answers)
            if self._waits.get(key) is wait:
                wait.is_reported = True
                self.reported_stalls += 1
                logger.warning("%s", text)


def _describe(wait: Wait, waited_s: float, answers: Mapping[int, Position] | None) -> str:
    """Say which ranks are missing, where they are, and what to do; ``answers`` None: they could not be asked."""
    collective, operations, late = wait.collective, wait.collective.pending_operations, wait.collective.late_ranks()
    missing, places = [], []
    for rank in range(collective.world_size):
        place = f"rank {rank}" if operations is None else operations.describe(rank)
        position = (answers or {}).get(rank)
        if rank == collective.rank or position == wait.position:
            continue
        # A rank that says nothing, but has begun the operation, computes.
        if position is not None or (answers is not None if late is None else rank in late):
            missing.append(rank)
            if position is not None:
                place += f", which waits for another: {position}"
            elif answers is not None:
                place += ", which is not waiting in any psengine operation"
            places.append(place)
    said = [f"rank {collective.rank} of {collective.world_size} has waited {waited_s:.0f} s for {wait.position}."]
    if missing:
        said.append(f"Missing: {'; '.join(places)}.")
    if operations is not None and answers is None:
        said.append("The rendezvous store does not answer, so nobody could be asked where it waits.")
    if missing:
        said.append(
            "Look there for a branch that only some ranks take, fewer batches (model.join()), or data loading that is"
            f" stuck.{'' if operations is None else operations.advise(missing)}"
        )
    elif answers is not None or operations is None:
        said.append("No rank is known to be missing, so look at the network between them.")
    said.append(f"This is no error yet: the wait may last {wait.timeout_s:g} s.")
    return " ".join(said)


inspector = StallInspector()
if hasattr(os, "register_at_fork"):
    # The parent's waits are not the child's, nor is the thread.
    os.register_at_fork(after_in_child=inspector.__init__)  # type: ignore[misc]
