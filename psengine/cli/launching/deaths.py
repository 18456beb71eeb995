"""When processes died: in which order, to the millisecond.

torchrun's agent looks every 0.1 s and notes whole seconds; a rank that fails and a peer that fails because of it are
the same to it. A pidfd tells at once; where the system has none, each process is looked at every few milliseconds.
"""

from __future__ import annotations

import os
import select
import threading
import time
from contextlib import suppress

_POLL_S = 0.01


class DeathWatch:
    """Notes when children of this process end. A context manager; reaps nobody.

    Attributes:
        ended_s: process id to ``time.time()`` of its end.
        exit_codes: process id to its exit code, negative for a signal, where it was seen before it was reaped.
    """

    def __init__(self) -> None:
        self.ended_s: dict[int, float] = {}
        self.exit_codes: dict[int, int] = {}
        # Unlike poll, epoll takes another descriptor while it waits.
        self._epoll = select.epoll() if hasattr(select, "epoll") and hasattr(os, "pidfd_open") else None
        self._descriptors: dict[int, int] = {}
        # Held from poll to close: the number of a closed descriptor may be another process's a moment later.
        self._lock = threading.Lock()
        self._polled: set[int] = set()
        self._wake_reader, self._wake_writer = os.pipe()
        # It may be woken by a byte that it has read already.
        os.set_blocking(self._wake_reader, False)
        if self._epoll is not None:
            self._epoll.register(self._wake_reader, select.EPOLLIN)
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="psengine-death-watch", daemon=True)

    def __enter__(self) -> DeathWatch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_ending.set()
        os.write(self._wake_writer, b"x")
        self._thread.join()
        os.close(self._wake_reader)
        os.close(self._wake_writer)
        if self._epoll is not None:
            self._epoll.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = {}

    def add(self, pid: int) -> None:
        """Watch a child."""
        try:
            if self._epoll is None:
                raise OSError
            descriptor = os.pidfd_open(pid)
        except OSError:  # an old kernel, a sandbox without the call, another system
            self._polled.add(pid)
            os.write(self._wake_writer, b"x")
            return
        with self._lock:
            self._descriptors[descriptor] = pid
            self._epoll.register(descriptor, select.EPOLLIN)

    def settle(self) -> None:
        """Note those that are gone by now."""
        self._look()

    def _watch(self) -> None:
        while not self._is_ending.is_set():
            if self._epoll is None:
                time.sleep(_POLL_S)
            else:
                self._epoll.poll(_POLL_S if self._polled else -1)
            with suppress(BlockingIOError):
                os.read(self._wake_reader, 64)
            self._look()

    def _look(self) -> None:
        if self._epoll is not None:
            with self._lock:
                for descriptor, _ in self._epoll.poll(0):
                    pid = self._descriptors.pop(descriptor, None)
                    if pid is None:
                        continue  # the byte that wakes the thread
                    self._note_exit_code(descriptor)
                    self.ended_s.setdefault(pid, time.time())
                    # A run of many restarts would have none left.
                    self._epoll.unregister(descriptor)
                    os.close(descriptor)
        for pid in [pid for pid in list(self._polled) if pid not in self.ended_s and not _runs(pid)]:
            self.ended_s.setdefault(pid, time.time())

    def _note_exit_code(self, descriptor: int) -> None:
        with suppress(OSError):
            found = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
                self.exit_codes.setdefault(found.si_pid, code)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        pass
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False
