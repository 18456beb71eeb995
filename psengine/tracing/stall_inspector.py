"""Reports which ranks keep a wait from ending; never makes the wait fail.

A rank that takes a branch the others do not take, or whose data loader hangs, leaves the others in a collective until
its deadline, ten minutes later. So each wait is noted when it begins and when it ends. One daemon thread looks twice a
second for a wait that has lasted ``PSENGINE_STALL_S``, asks the other ranks through the rendezvous store where they
wait (``collectives/pending_operations.py``; such a thread of each waiting rank answers), and logs the answers::

    rank 0   wait ──────────────── 30 s: who is where? ── 6 s ── WARNING ... 60 s ... WARNING ... INFO it ended
    rank 1   (sleeps; does not answer)
    rank 2   wait ──────────────────────── "here" ───────────────

Other waits, such as those of clients of parameter servers, use the schedule alone::

    schedule = StallSchedule(stall_after_s())     # for each wait; 0 never is due
    if schedule.is_due(waited_s):                 # after 30, 60, 120 ... seconds
        logger.warning(...)
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
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


class StallSchedule:
    """When to report a wait: after ``after_s`` seconds, then each time that it has become twice as long.

    Attributes:
        has_reported: whether a report was due before.
    """

    def __init__(self, after_s: float) -> None:
        self._next_s = after_s
        self.has_reported = False

    def is_due(self, waited_s: float) -> bool:
        """Whether a wait of ``waited_s`` seconds is to be reported now; True once for each time."""
        if self._next_s <= 0 or waited_s < self._next_s:
            return False
        while waited_s >= self._next_s:
            self._next_s *= 2
        self.has_reported = True
        return True


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


# A wait: its start, the collective, the operation's number and name, its deadline, and the seconds after which it is
# reported. A tuple, because every small all-reduce makes one.
_Noted = tuple[float, Watched, int, str, float, float]


class Wait:
    """One rank's wait for one operation that has lasted ``ANSWER_AFTER_S``; does not keep its collective alive."""

    def __init__(self, noted: _Noted) -> None:
        self.since_s, collective, operation, what, self.timeout_s, after_s = noted
        self.collective = weakref.ref(collective)
        self.rank, self.world_size = collective.rank, collective.world_size
        self.position = Position(operation, what)
        self.schedule = StallSchedule(after_s)
        self.grace_s = min(max(SHORTEST_GRACE_S, after_s / 5), LONGEST_GRACE_S)
        self.question = 0
        self.asked_s = 0.0


class StallInspector:
    """Watches the waits of this process; there is one, ``inspector``. Its thread starts with the first wait.

    Attributes:
        reported_stalls: reports so far.
    """

    def __init__(self) -> None:
        # By thread, which waits for one operation at a time.
        self._noted: dict[int, _Noted] = {}
        self._waits: dict[int, Wait] = {}
        self.reported_stalls = 0
        # By the ranks' pending operations, the question this rank answered last.
        self._answered: weakref.WeakKeyDictionary[PendingOperations, int] = weakref.WeakKeyDictionary()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._starting = threading.Lock()
        self._follows_forks = False
        self._cannot_start = False

    def enter(self, collective: Watched, operation: int, what: str, timeout_s: float, after_s: float) -> int:
        """A wait of this thread begins, to be reported after ``after_s`` seconds. Return the key for ``leave``."""
        key = threading.get_ident()
        self._noted[key] = (time.monotonic(), collective, operation, what, timeout_s, after_s)
        if self._thread is None:
            self._start()
        return key

    def leave(self, key: int) -> None:
        """The wait is over, with a result or an error."""
        self._noted.pop(key, None)

    # ---- the thread --------------------------------------------------------------------------------------------

    def _start(self) -> None:
        with self._starting:
            if self._thread is not None or self._cannot_start:
                return
            if not self._follows_forks and hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=self._forget)
                self._follows_forks = True
            thread = threading.Thread(target=self._run, name="psengine-stall-inspector", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no memory or number for one more, or the interpreter is about to end
                self._cannot_start = True
                logger.warning("waits for other ranks are not watched (%s)", error)
                return
            self._thread = thread
            # A thread in a store's native code when the interpreter ends would abort the process.
            atexit.register(self._end)

    def _forget(self) -> None:
        """In a forked child: the parent's waits are not its own, nor is the thread."""
        self.__init__()  # type: ignore[misc]
        self._follows_forks = True

    def _end(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2 * TICK_S)

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            now_s = time.monotonic()
            for key, noted in tuple(self._noted.items()):
                wait = self._waits.get(key)
                if (wait is None or wait.since_s != noted[0]) and now_s - noted[0] >= ANSWER_AFTER_S:
                    self._forget_wait(key, now_s)
                    self._waits[key] = Wait(noted)
            for key, wait in tuple(self._waits.items()):
                if not self._lasts(key, wait):
                    self._forget_wait(key, now_s)
                    continue
                for look in (self._answer, self._ask_or_report):
                    try:
                        look(key, wait, now_s)
                    except Exception:  # the store may be gone; this rank still reports what it knows
                        logger.debug("rank %d cannot ask the others", wait.rank, exc_info=True)

    def _lasts(self, key: int, wait: Wait) -> bool:
        noted = self._noted.get(key)
        return noted is not None and noted[0] == wait.since_s

    def _forget_wait(self, key: int, now_s: float) -> None:
        wait = self._waits.pop(key, None)
        if wait is not None and wait.schedule.has_reported:
            waited_s = now_s - wait.since_s
            logger.info("rank %d no longer waits for %s; it took %.0f s", wait.rank, wait.position, waited_s)

    def _answer(self, _key: int, wait: Wait, _now_s: float) -> None:
        collective = wait.collective()
        operations = None if collective is None else collective.pending_operations
        if operations is None:
            return
        question = operations.latest_question()
        if question > self._answered.get(operations, 0):
            operations.answer(question, wait.position)
            self._answered[operations] = question

    def _ask_or_report(self, key: int, wait: Wait, now_s: float) -> None:
        waited_s, collective = now_s - wait.since_s, wait.collective()
        if collective is None:
            return
        operations = collective.pending_operations
        if wait.asked_s == 0 and wait.schedule.is_due(waited_s):
            wait.asked_s = now_s
            wait.question = 0  # until the store has taken one
            if operations is not None:
                wait.question = operations.ask()
        elif wait.asked_s != 0 and now_s - wait.asked_s >= wait.grace_s:
            wait.asked_s = 0.0
            wait.schedule.is_due(waited_s)  # this report also stands for one that became due meanwhile
            answers: Mapping[int, Position] | None = None
            if operations is not None and wait.question > 0:
                try:
                    answers = operations.answers(wait.question)
                except Exception:  # the store is gone
                    logger.debug("rank %d cannot hear the others", wait.rank, exc_info=True)
            text = describe_stall(wait, waited_s, answers, collective.late_ranks(), operations)
            if self._lasts(key, wait):
                self.reported_stalls += 1
                logger.warning("%s", text)


def describe_stall(
    wait: Wait,
    waited_s: float,
    answers: Mapping[int, Position] | None,
    late: Sequence[int] | None,
    pending_operations: PendingOperations | None,
) -> str:
    """Return the report: which ranks are missing, where they are, and what to do.

    Args:
        wait: of this rank.
        waited_s: its length.
        answers: where other ranks wait; None where they could not be asked.
        late: ranks that have not begun the operation; None where the transport does not know.
        pending_operations: names the ranks.
    """
    here = wait.position
    were_asked = answers is not None and pending_operations is not None
    heard = answers or {}
    others = [rank for rank in range(wait.world_size) if rank != wait.rank]
    elsewhere = [rank for rank in others if rank in heard and heard[rank] != here]
    absent = [rank for rank in others if rank not in heard and (were_asked if late is None else rank in late)]
    name = (lambda rank: f"rank {rank}") if pending_operations is None else pending_operations.describe
    text = f"rank {wait.rank} of {wait.world_size} has waited {waited_s:.0f} s for {here}. "
    if absent:
        are = "is" if len(absent) == 1 else "are"
        doing = f", which {are} not waiting in any psengine operation" if were_asked else ""
        text += f"Missing: {', '.join(map(name, absent))}{doing}. "
    for rank in elsewhere:
        text += f"{name(rank)} waits for another: {heard[rank]}. "
    if pending_operations is not None and not were_asked:
        text += (
            "The rendezvous store does not answer (its link is cut or overloaded, or rank 0 or torchrun's agent, which"
            " hosts it, hangs or is gone), so nobody could be asked. "
        )
    if elsewhere:
        text += (
            "Ranks must call the same operations in the same order: look for a branch that only some ranks take, or"
            " for ranks with fewer batches (model.join())."
        )
    elif absent:
        text += "Look there for a branch that only some ranks take, or for data loading that is stuck."
    elif were_asked or pending_operations is None:
        text += "No rank is known to be missing, so look at the network between them."
    if absent and pending_operations is not None:
        text += pending_operations.advise(absent)
    return f"{text.rstrip()} This is no error yet: the wait may last {wait.timeout_s:g} s."


inspector = StallInspector()
