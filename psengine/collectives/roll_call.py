"""Who is still there? A roll call through the rendezvous store, held when a collective fails or takes long.

Transports report a lost peer as a socket address or not at all, and only to that peer's neighbours. So every rank
leaves its host and process id in the store when it starts; the first rank whose operation fails raises an alarm there;
ranks that wait look for the alarm once a second and answer it; whoever does not answer is named in everybody's error.

::

    rank 0   all_reduce ── error ── alarm! present/0 ── collect ── PeerLostError(ranks=(2,))
    rank 1   all_reduce ──────── 1 s ── alarm? present/1 ── collect ── PeerLostError(ranks=(2,))
    rank 2   killed
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Protocol

POLL_INTERVAL_S = 0.1


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that a roll call needs."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


def is_process_running(process_id: int) -> bool:
    """Whether a process of this host runs; a zombie (dead, not yet reaped by its parent) does not."""
    try:
        # The state follows the command name, which may itself hold spaces and parentheses (man 5 proc).
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return False
        return _answers_signal_zero(process_id)
    except (OSError, IndexError):
        return _answers_signal_zero(process_id)
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


class RollCall:
    """One rank's view of who else of its group is alive.

    Args:
        store: key-value store all ranks reach; keys are prefixed with ``psengine/<group>/``.
        group: name of the group, the same on every rank and unique among the store's users.
        rank: this rank in the group.
        world_size: ranks in the group.
        grace_s: how long a silent rank may take to answer. A rank that computes and is not waiting for a collective
            answers only when it waits again, so too short a grace names healthy ranks. Ranks of this host whose
            process is gone are named without any grace.
    """

    def __init__(self, store: Store, group: str, rank: int, world_size: int, grace_s: float = 10.0) -> None:
        self._store = store
        self._prefix = f"psengine/{group}/"
        self._rank = rank
        self._world_size = world_size
        self._grace_s = grace_s
        self._host = socket.gethostname()
        self._members: dict[int, tuple[str, int]] = {}
        self._store.set(f"{self._prefix}member/{rank}", f"{os.getpid()} {self._host}")

    def alarm_raised(self) -> bool:
        """Whether some rank's operation failed; never blocks for long, and remembers where the others live."""
        self._look_up_members()
        return self._store.check([self._prefix + "alarm"])

    def lost_processes(self) -> tuple[int, ...]:
        """Ranks of this host whose process has ended, ascending; needs no answer from anybody."""
        return tuple(rank for rank in range(self._world_size) if self._has_exited(rank))

    def missing_ranks(self) -> tuple[int, ...]:
        """Raise the alarm, wait for the others' answers up to the grace, and return who is missing, ascending.

        Raises:
            RuntimeError, OSError: whatever the store raises when its host is gone.
        """
        self._store.set(self._prefix + "alarm", "raised")
        self._store.set(f"{self._prefix}present/{self._rank}", "yes")
        self._look_up_members()
        deadline = time.monotonic() + self._grace_s
        while True:
            silent = tuple(rank for rank in range(self._world_size) if not self._is_present(rank))
            everybody_silent_exited = all(self._has_exited(rank) for rank in silent)
            if everybody_silent_exited or time.monotonic() > deadline:
                return silent
            time.sleep(POLL_INTERVAL_S)

    def describe(self, ranks: tuple[int, ...]) -> str:
        """Where ``ranks`` ran and what became of them: "rank 1 (process 4711 on host, which has exited)"."""
        return ", ".join(self._describe_one(rank) for rank in ranks)

    def _describe_one(self, rank: int) -> str:
        if rank not in self._members:
            return f"rank {rank}"
        host, process_id = self._members[rank]
        fate = "has exited" if self._has_exited(rank) else f"did not answer within {self._grace_s:g} s"
        return f"rank {rank} (process {process_id} on {host}, which {fate})"

    def _is_present(self, rank: int) -> bool:
        return self._store.check([f"{self._prefix}present/{rank}"])

    def _has_exited(self, rank: int) -> bool:
        if rank not in self._members:
            return False
        host, process_id = self._members[rank]
        return host == self._host and not is_process_running(process_id)

    def _look_up_members(self) -> None:
        for rank in range(self._world_size):
            key = f"{self._prefix}member/{rank}"
            if rank not in self._members and self._store.check([key]):
                process_id, _, host = self._store.get(key).decode().partition(" ")
                self._members[rank] = (host, int(process_id))
