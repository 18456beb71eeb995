"""Which ranks of a group live, and where they wait, through the rendezvous store.

Transports report a lost peer as a socket address or not at all, and only to that peer's neighbours. A rank that only
comes late is not reported at all. So the ranks have a row each in the store, which tells of a process::

    psengine/<group>/rank/<rank>   its process id, its table of processes, its host
    psengine/row/<process>         the latest question that it has answered, and what it waited for then

A row is by process, not by rank, because a rank may wait in another group than the one that asks. Questions are
numbered in ``psengine/question``; ranks answer while they wait. There are two that ask.

The stall inspector asks where the ranks are that a long wait waits for; see ``tracing/stall_inspector.py``.

A roll call finds missing ranks after a failure. The first rank whose operation fails raises an alarm: it writes its
question's number to ``psengine/<group>/alarm``. Ranks that wait look for the alarm once a second and answer it; every
rank's error names those that did not answer::

    rank 0   all_reduce ── error ── alarm 1! row 1 ── collect ── PeerLostError(ranks=(2,))
    rank 1   all_reduce ──────── 1 s ── an alarm? row 1 ── collect ── PeerLostError(ranks=(2,))
    rank 2   killed

The store may be as dead as a peer, so threads that can be abandoned ask it, by operations that do not wait: a thread
that waits in the store keeps the others of its process out. A store that keeps silent may also be behind a link that is
cut for a while, which TCP gets over: a rank of which no operation has failed goes on waiting for its data, and gives
the store PATIENCE_S.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

from psengine.environment.processes import has_exited, process_state, process_table
from psengine.environment.threads import Result, begin

POLL_INTERVAL_S = 0.1
# How long a look for alarms is waited for: the wait for data goes on meanwhile.
LOOK_S = 1.0
# What is asked for a report takes ten round trips: a millisecond each, or half a second over a link that data fills.
REPORT_S = 5.0
# How long the store may keep silent while no operation has failed: shorter cuts of a link heal.
PATIENCE_S = 60.0
QUESTION = "psengine/question"
_THREAD = "psengine-roll-call"

Store = Any  # a torch.distributed.Store

# The number in this process's row only grows, whichever threads write it.
_row_lock = threading.Lock()


class StoreSilentError(Exception):
    """The store did not answer in time."""


class Process(NamedTuple):
    """Where a rank runs; ``table`` is the ``process_table`` there."""

    process_id: int
    table: str
    host: str

    def __str__(self) -> str:
        return f"{self.process_id} {self.table or '-'} {self.host}"


class Liveness:
    """Finds the ranks of a group that are alive, for one of them, and where they wait.

    Methods that ask the store raise StoreSilentError where it does not answer, and its own errors (RuntimeError,
    OSError) where it is gone.

    Args:
        store: key-value store all ranks reach.
        group: name of the group, the same on every rank and unique among the store's users.
        rank: this rank in the group.
        world_size: ranks in the group.
        grace_s: how long a silent rank may take to answer. A rank that computes answers only when it waits again, so
            too short a grace names healthy ranks. Ranks of this host whose process has ended need no grace.
        patience_s: how long the store may leave a look for alarms without an answer.
    """

    def __init__(
        self, store: Store, group: str, rank: int, world_size: int, grace_s: float, patience_s: float = PATIENCE_S
    ) -> None:
        self._store = store
        self._prefix = f"psengine/{group}"
        self._alarm_key = f"{self._prefix}/alarm"
        self.rank = rank
        self.world_size = world_size
        self._grace_s = grace_s
        self._patience_s = patience_s
        self._here = Process(os.getpid(), process_table(), socket.gethostname())
        self._processes = {rank: self._here}  # as far as they are known, by rank
        self._settled_alarm = self._raised_alarm = 0
        # By thread, its question that the store has not answered.
        self._pending: dict[int, Future[Any]] = {}
        # A look for alarms that has no answer yet, and when it began.
        self._look: tuple[Future[bool], float] | None = None
        self._store.set(f"{self._prefix}/rank/{rank}", str(self._here))

    def note_processes(self, process_ids: Sequence[int]) -> None:
        """All ranks run on this host, as these processes: known even if the store never answers again."""
        self._processes = {rank: self._here._replace(process_id=number) for rank, number in enumerate(process_ids)}

    # ---- where the ranks wait ----

    def ask(self) -> int:
        """Ask all ranks where they are; return the question's number."""
        return self._ask(self._count_up, REPORT_S)

    def answer(self, position: str, answered: int) -> int:
        """Write where this rank waits, if there is a question after number ``answered``; return the latest's number."""

        def write_if_asked() -> int:
            return self._write_row(position) if self._count_at(QUESTION) > answered else answered

        return self._ask(write_if_asked, REPORT_S)

    def answers(self, question: int) -> Mapping[int, str]:
        """By rank, where those wait that answered ``question`` or a later one."""

        def read() -> dict[int, str]:
            self.look_up_processes()
            rows = {rank: self._row(rank) for rank in self._processes}
            return {rank: position for rank, (number, position) in rows.items() if number >= question}

        return self._ask(read, REPORT_S)

    def first_choice(self, what: str, mine: str) -> str:
        """What the first rank has chosen that asks for ``what``; ``mine``, if that is this one."""
        key = f"{self._prefix}/{what}"
        return self._ask(lambda: str(self._store.compare_set(key, "", mine).decode()), self._patience_s)

    def arrive(self, place: str) -> None:
        """Say that this rank is at ``place``; see ``absent``."""
        self._ask(lambda: self._store.set(f"{self._prefix}/{place}/{self.rank}", ""), self._patience_s)

    def absent(self, place: str) -> list[int]:
        """The ranks that have not said that they are there."""
        ranks = range(self.world_size)
        return self._ask(
            lambda: [rank for rank in ranks if not self._store.check([f"{self._prefix}/{place}/{rank}"])],
            self._patience_s,
        )

    # ---- who is missing ----

    def alarm_raised(self) -> bool:
        """Whether there is an alarm that this rank has not answered, as far as the store has said by now; also learns
        where the others live.
        """

        def look() -> bool:
            self.look_up_processes()
            return self._count_at(self._alarm_key) > self._settled_alarm

        asked, since_s = self._look or (begin(look, _THREAD), time.monotonic())
        self._look = (asked, since_s)
        if not wait([asked], LOOK_S).done:
            if time.monotonic() - since_s <= self._patience_s:
                return False
            self._pending[threading.get_ident()] = asked
            raise StoreSilentError(f"no answer within {self._patience_s:g} s: it hangs, or the link to it is cut")
        self._look = None
        return asked.result()

    def lost_processes(self) -> tuple[int, ...]:
        """Ranks whose process this one can see has ended, ascending; asks no rank."""
        return tuple(rank for rank in range(self.world_size) if self._has_exited(rank))

    def missing_ranks(self, what: str, *, begin: bool) -> tuple[int, ...]:
        """Answer the alarm, and return the ranks that did not within the grace, ascending.

        Args:
            what: the operation that this rank waits for.
            begin: it failed: where there is no alarm, or the last one found everybody, raise one.
        """
        self._settled_alarm = alarm = self._ask(lambda: self._answer_alarm(what, begin=begin), self._grace_s)
        deadline = time.monotonic() + self._grace_s
        while silent := self._ask(lambda: self._silent_ranks(alarm), self._grace_s):
            if all(self._has_exited(rank) for rank in silent) or time.monotonic() > deadline:
                return silent
            time.sleep(POLL_INTERVAL_S)
        return self.missing_ranks(what, begin=True) if begin and self._raised_alarm != alarm else ()

    def _answer_alarm(self, what: str, *, begin: bool) -> int:
        alarm = self._count_at(self._alarm_key)
        if begin and alarm <= self._settled_alarm:
            # Ranks that fail at the same moment all get the first one's number.
            alarm = self._store.compare_set(self._alarm_key, str(alarm) if alarm else "", str(self._count_up()))
            self._raised_alarm = alarm = int(alarm)
        self._write_row(what)
        return alarm

    def _silent_ranks(self, alarm: int) -> tuple[int, ...]:
        self.look_up_processes()
        return tuple(rank for rank in range(self.world_size) if self._row(rank)[0] < alarm)

    # ---- in words ----

    def describe(self, rank: int) -> str:
        """Where ``rank`` runs: "rank 1 (process 4711 on host)"; says so where a signal has stopped it."""
        if rank not in self._processes:
            return f"rank {rank}"
        process = self._processes[rank]
        is_stopped = self._is_seen(rank) and process_state(process.process_id) == "T"
        fate = ", stopped by a signal" if is_stopped else ""
        return f"rank {rank} (process {process.process_id} on {process.host}{fate})"

    def describe_lost(self, rank: int) -> str:
        """Where ``rank`` ran and its fate: "rank 1 (process 4711 on host, which has exited)"."""
        fate = "has exited" if self._has_exited(rank) else f"did not answer within {self._grace_s:g} s"
        return f"{self.describe(rank)[:-1]}, which {fate})" if rank in self._processes else f"rank {rank}"

    def describe_waits(self) -> str:
        """Why an operation may have failed while all ranks answer the last roll call."""
        waits = self.answers(self._settled_alarm)
        if len(set(waits.values())) < 2:
            return "Every rank answered the roll call, so the fault lies in the transport."
        listed = "; ".join(f"rank {rank}: {what}" for rank, what in waits.items())
        return (
            f"Every rank answered the roll call, from different operations ({listed}). Ranks must call the same ones in"
            " the same order: look for a branch that only some ranks take, and for another collective= or"
            " PSENGINE_COLLECTIVE on some of them. Where there is none, the fault lies in the transport."
        )

    def _is_seen(self, rank: int) -> bool:
        """Whether this process sees that of ``rank`` by its number."""
        return bool(self._here.table) and rank in self._processes and self._processes[rank][1:] == self._here[1:]

    def _has_exited(self, rank: int) -> bool:
        return self._is_seen(rank) and has_exited(self._processes[rank].process_id)

    # ---- the store ----

    def _ask(self, question: Callable[[], Result], within_s: float) -> Result:
        """Ask the store; a thread that has no answer yet does not ask again."""
        thread = threading.get_ident()
        if thread in self._pending and not self._pending[thread].done():
            raise StoreSilentError("it has not answered an earlier question: it hangs, or the link to it is cut")
        self._pending[thread] = asked = begin(question, _THREAD)
        if not wait([asked], within_s).done:
            raise StoreSilentError(f"no answer within {within_s:g} s: it hangs, or the link to it is cut")
        return asked.result()

    def _count_at(self, key: str) -> int:
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _count_up(self) -> int:
        """Return the number of a new question; ranks that ask at the same moment all get the first one's."""
        count = self._count_at(QUESTION)
        return int(self._store.compare_set(QUESTION, str(count) if count else "", str(count + 1)))

    def _write_row(self, position: str) -> int:
        """Answer the latest question; return its number."""
        with _row_lock:
            number = self._count_at(QUESTION)
            self._store.set(f"psengine/row/{self._here}", f"{number} {position}")
        return number

    def _row(self, rank: int) -> tuple[int, str]:
        """The question that ``rank`` has answered last, 0 for none, and where it waited."""
        key = f"psengine/row/{self._processes.get(rank)}"
        if rank not in self._processes or not self._store.check([key]):
            return 0, ""
        number, position = self._store.get(key).decode().split(" ", 1)
        return int(number), position

    def look_up_processes(self) -> None:
        """Learn where those ranks live that have said so by now."""
        for rank in range(self.world_size):
            key = f"{self._prefix}/rank/{rank}"
            if rank not in self._processes and self._store.check([key]):
                process_id, table, host = self._store.get(key).decode().split(" ", 2)
                self._processes[rank] = Process(int(process_id), "" if table == "-" else table, host)
