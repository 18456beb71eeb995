"""A roll call through the rendezvous store, which finds missing ranks when a collective fails or takes long.

Transports report a lost peer as a socket address or not at all, and only to that peer's neighbours. So every rank
leaves its host and process id in the store when it starts; the first rank whose operation fails raises an alarm there;
ranks that wait look for the alarm once a second and answer it; every rank's error names those that did not answer.

::

    rank 0   all_reduce ── error ── call 1! present/1/0 ── collect ── PeerLostError(ranks=(2,))
    rank 1   all_reduce ──────── 1 s ── a call? present/1/1 ── collect ── PeerLostError(ranks=(2,))
    rank 2   killed

Calls are numbered, and each needs its own answers. The store may be as dead as a peer, so a thread that can be
abandoned asks it. A store that keeps silent may also be behind a link that is cut for a while, which TCP gets over: a
rank of which no operation has failed goes on waiting for its data, and gives the store PATIENCE_S.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

POLL_INTERVAL_S = 0.1
# A look for alarms is a message and its answer; a second is much even on a link that data fills.
LOOK_S = 1.0
# How long the store may keep silent while no operation has failed: shorter cuts of a link heal.
PATIENCE_S = 60.0

Result = TypeVar("Result")
Store = Any  # a torch.distributed.Store


class StoreSilentError(Exception):
    """The store did not answer in time."""


def ask(question: Callable[[], Result]) -> Future[Result]:
    """Call ``question`` in a thread that can be abandoned."""
    asked: Future[Result] = Future()

    def run() -> None:
        try:
            asked.set_result(question())
        except BaseException as error:
            asked.set_exception(error)

    threading.Thread(target=run, name="psengine-roll-call", daemon=True).start()
    return asked


def answer_of(asked: Future[Result], within_s: float) -> Result:
    """Return the answer, or raise what the question raised.

    Raises:
        StoreSilentError: there is none after ``within_s``.
    """
    if not wait([asked], within_s).done:
        raise StoreSilentError(f"no answer within {within_s:g} s: it hangs, or the link to it is cut")
    return asked.result()


def count_at(store: Store, key: str) -> int:
    """The number that ``count_up`` left at ``key``, 0 for none; waits for nobody."""
    return int(store.get(key)) if store.check([key]) else 0


def count_up(store: Store, key: str, count: int) -> int:
    """Return the number after ``count``; ranks that count up at the same moment all get the first one's."""
    return int(store.compare_set(key, str(count) if count else "", str(count + 1)))


@functools.cache
def process_table() -> str:
    """A word for the processes that this one can see by number: the same in another process if, and only if, process
    numbers mean the same there. Hosts and containers may have a name in common. Empty where Linux does not say.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def process_state(process_id: int) -> str | None:
    """The letter of a process's state as Linux gives it, such as "T" for stopped; None where it is not known."""
    try:
        # The state follows the command name, which may itself hold spaces and parentheses (man 5 proc).
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def is_process_running(process_id: int) -> bool:
    """Whether a process of this host runs; a zombie (dead, not yet reaped by its parent) does not."""
    state = process_state(process_id)
    if state is None:
        has_exited = Path("/proc/self/stat").exists() and not Path(f"/proc/{process_id}").exists()
        return not has_exited and _answers_signal_zero(process_id)
    return state not in "ZX"


def _answers_signal_zero(process_id: int) -> bool:
    if os.name != "posix":
        return True  # on Windows os.kill(pid, 0) would end the process
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


class Liveness:
    """Finds the ranks of a group that are alive, for one of them.

    Args:
        store: key-value store all ranks reach; keys are prefixed with ``psengine/<group>/``.
        group: name of the group, the same on every rank and unique among the store's users.
        rank: this rank in the group.
        world_size: ranks in the group.
        grace_s: how long a silent rank may take to answer. A rank that computes answers only when it waits again, so
            too short a grace names healthy ranks. Ranks of this host whose process has ended need no grace.
        patience_s: how long the store may leave a look for alarms without an answer.
    """

    def __init__(
        self,
        store: Store,
        group: str,
        rank: int,
        world_size: int,
        grace_s: float = 10.0,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.store = store
        self._prefix = f"psengine/{group}/"
        self._call_key = f"{self._prefix}call"
        self.rank = rank
        self.world_size = world_size
        self._grace_s = grace_s
        self._host = socket.gethostname()
        # By rank, its host and process id, and in which table of processes that is.
        self._members: dict[int, tuple[str, int]] = {rank: (self._host, os.getpid())}
        self._tables: dict[int, str] = {rank: process_table()}
        self._settled_call = 0
        self._began_call = 0
        self._is_store_silent = False
        self._patience_s = patience_s
        # A look for alarms that has no answer yet, and when it began.
        self._look: tuple[Future[bool], float] | None = None
        self.store.set(f"{self._prefix}member/{rank}", f"{os.getpid()} {process_table() or '-'} {self._host}")

    # These raise StoreSilentError where the store does not answer, RuntimeError or OSError where its host is gone.

    def alarm_raised(self) -> bool:
        """Whether a call is on that this rank has not answered, as far as the store has said by now; also learns where
        the others live.
        """

        def look() -> bool:
            self.look_up_members()
            return count_at(self.store, self._call_key) > self._settled_call

        asked, since_s = self._look or (ask(look), time.monotonic())
        self._look = (asked, since_s)
        if not wait([asked], LOOK_S).done:
            if time.monotonic() - since_s <= self._patience_s:
                return False
            self._is_store_silent = True
            raise StoreSilentError(f"no answer within {self._patience_s:g} s: it hangs, or the link to it is cut")
        self._look = None
        return asked.result()

    def lost_processes(self) -> tuple[int, ...]:
        """Ranks of this host whose process has ended, ascending; asks no rank."""
        return tuple(rank for rank in range(self.world_size) if self._has_exited(rank))

    def missing_ranks(self, *, begin: bool) -> tuple[int, ...]:
        """Answer the call that is on, and return the ranks that did not within the grace, ascending.

        Args:
            begin: this rank's own operation failed: where no call is on, or the current one found everybody, begin one.
        """
        self._settled_call = call = self._ask(lambda: self._join_call(begin=begin))
        silent = self._silent_ranks(call)
        if not silent and begin and self._began_call != call:
            return self.missing_ranks(begin=True)
        return silent

    def _silent_ranks(self, call: int) -> tuple[int, ...]:
        deadline = time.monotonic() + self._grace_s
        while True:
            silent = self._ask(lambda: tuple(r for r in range(self.world_size) if not self._is_present(call, r)))
            if all(self._has_exited(rank) for rank in silent) or time.monotonic() > deadline:
                return silent
            time.sleep(POLL_INTERVAL_S)

    def note_processes(self, process_ids: Sequence[int]) -> None:
        """All ranks run on this host, as these processes: known even if the store never answers again."""
        self._members = {rank: (self._host, process_id) for rank, process_id in enumerate(process_ids)}
        self._tables = dict.fromkeys(self._members, process_table())

    def place_of(self, rank: int) -> tuple[str, int] | None:
        """The host and process id of ``rank``, where it is known."""
        return self._members.get(rank)

    def name_of(self, rank: int) -> str | None:
        """A name for the process of ``rank`` that no other process has, where it is known."""
        place = self.place_of(rank)
        return None if place is None else f"{place[1]}@{place[0]}/{self._tables[rank]}"

    def _is_seen(self, rank: int) -> bool:
        """Whether this process sees that of ``rank`` by its number."""
        return rank in self._members and (self._members[rank][0], self._tables[rank]) == (self._host, process_table())

    def describe_place(self, rank: int) -> str:
        """Where ``rank`` runs: "rank 1 (process 4711 on host)"; says so where a signal has stopped it."""
        if rank not in self._members:
            return f"rank {rank}"
        host, process_id = self._members[rank]
        is_stopped = self._is_seen(rank) and process_state(process_id) == "T"
        return f"rank {rank} (process {process_id} on {host}{', stopped by a signal' if is_stopped else ''})"

    def describe(self, ranks: tuple[int, ...]) -> str:
        """Where ``ranks`` ran and their fate: "rank 1 (process 4711 on host, which has exited)"."""
        return ", ".join(map(self._describe_lost, ranks))

    def _describe_lost(self, rank: int) -> str:
        place = self.describe_place(rank)
        if rank not in self._members:
            return place
        fate = "has exited" if self._has_exited(rank) else f"did not answer within {self._grace_s:g} s"
        return f"{place[:-1]}, which {fate})"

    def _ask(self, question: Callable[[], Result]) -> Result:
        """Ask the store, for at most the grace; after one silence it is not asked again."""
        if self._is_store_silent:
            raise StoreSilentError("it kept silent before: it hangs, or the link to it is cut")
        try:
            return answer_of(ask(question), self._grace_s)
        except StoreSilentError:
            self._is_store_silent = True
            raise

    def _join_call(self, *, begin: bool) -> int:
        call = count_at(self.store, self._call_key)
        if call <= self._settled_call and begin:
            self._began_call = call = count_up(self.store, self._call_key, call)
        self.store.set(f"{self._prefix}present/{call}/{self.rank}", "yes")
        self.look_up_members()
        return call

    def _is_present(self, call: int, rank: int) -> bool:
        return bool(self.store.check([f"{self._prefix}present/{call}/{rank}"]))

    def _has_exited(self, rank: int) -> bool:
        return self._is_seen(rank) and not is_process_running(self._members[rank][1])

    def look_up_members(self, *, waits: bool = False) -> None:
        """Learn where those ranks live that have said so by now; ``waits``: where all do."""
        for rank in range(self.world_size):
            key = f"{self._prefix}member/{rank}"
            if rank not in self._members and (waits or self.store.check([key])):
                process_id, table, host = self.store.get(key).decode().split(" ", 2)
                self._members[rank] = (host, int(process_id))
                self._tables[rank] = "" if table == "-" else table
