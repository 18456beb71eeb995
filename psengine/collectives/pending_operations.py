"""Asks the ranks, through the rendezvous store, where they wait; see ``stall_inspector``.

::

    psengine/stall/question                   the number of the latest question
    psengine/stall/answer/<n>/<process>       what that process waited for when it saw question n

Answers are by process, not by rank, because a rank may wait in another group than the one that asks. Short waits read
and write nothing. Only operations of the store that do not wait are used: a thread that waits in the store keeps the
others of its process out. Where the store's host has stopped they do not return; no question is asked until they do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from psengine.collectives.liveness import (
    Liveness,
    Result,
    StoreSilentError,
    answer_of,
    ask,
    count_at,
    count_up,
)

QUESTION = "psengine/stall/question"
ANSWER = "psengine/stall/answer/"
# For a question and its answer: a millisecond, over a link that data fills a tenth of a second.
STORE_TIMEOUT_S = 1.0


class StorePendingOperations:
    """Tells other ranks where this one waits, and returns where those of its group do; for one thread.

    Methods that ask the store raise StoreSilentError where it does not answer, and its own errors where it is gone.
    """

    def __init__(self, liveness: Liveness) -> None:
        self.rank, self.world_size = liveness.rank, liveness.world_size
        self._liveness = liveness
        self._store = liveness.store
        self._pending: Future[Any] | None = None

    def ask(self) -> int:
        """Ask all ranks where they are; return the question's number."""
        return self._put(lambda: count_up(self._store, QUESTION, self._latest_question()))

    def _put(self, question: Callable[[], Result]) -> Result:
        if self._pending is not None and not self._pending.done():
            raise StoreSilentError("it has not answered an earlier question")
        self._pending = pending = ask(question)
        return answer_of(pending, STORE_TIMEOUT_S)

    def _latest_question(self) -> int:
        return count_at(self._store, QUESTION)

    def answer(self, position: str, answered: int) -> int:
        """Write where this rank waits, if there is a question after number ``answered``; return the latest's number."""
        question = self._put(self._latest_question)
        if question > answered and (key := self._key(question, self.rank)) is not None:
            self._put(lambda: self._store.set(key, position))
        return question

    def answers(self, question: int) -> Mapping[int, str]:
        """By rank, where those wait that answered ``question`` or a later one."""
        self._put(self._liveness.look_up_members)
        found = {}
        # Ranks answer only the latest they see, and another may have asked meanwhile.
        for later in range(question, self._put(self._latest_question) + 1):
            for rank in range(self.world_size):
                position = self._put(functools.partial(self._answer_of, later, rank))
                if position is not None:
                    found[rank] = position
        return found

    def _answer_of(self, question: int, rank: int) -> str | None:
        key = self._key(question, rank)
        if key is None or not self._store.check([key]):
            return None
        return str(self._store.get(key), "utf-8")

    def _key(self, question: int, rank: int) -> str | None:
        name = self._liveness.name_of(rank)
        return None if name is None else f"{ANSWER}{question}/{name}"

    def describe(self, rank: int) -> str:
        """Such as "rank 1 (process 4711 on host)"."""
        return self._liveness.describe_place(rank)

    def advise(self, ranks: Sequence[int]) -> str:
        """Commands that show where those ranks' processes are."""
        places = [self._liveness.place_of(rank) for rank in ranks]
        commands = [f"`py-spy dump --pid {place[1]}` on {place[0]}" for place in places if place is not None]
        return f" {', '.join(commands)} shows the line it is at." if commands else ""
