"""Ctrl-C, told apart from the second Ctrl-C; heard even where the main thread does not return to Python for long.

signal ──┬─► handler, in the main thread: the first is raised there, every other forces
         └─► wakeup descriptor ──► a thread: announces, forces and ends the process, where the handler does not run
"""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
# Wrappers (uv run, srun) pass on what the terminal has sent to the whole group: one Ctrl-C arrives twice.
REPEAT_S = 1.0
# So long the main thread has, to answer a signal itself. torch's store waits for its host outside Python, for a minute.
UNHEARD_S = 1.0
# ... and so long to come to its end, once it has not answered the second.
LEAVE_S = 4.0
_JOIN_S = 2.0
_LISTEN_S = 0.1


class Interruption:
    """Turns the first signal into an exception in the main thread, and the second into force. A context manager.

    Where the main thread does not answer the second, the process ends ``LEAVE_S`` after it, tidied or not.

    What was ignored when the block began (nohup, a shell's background job) stays ignored.

    Args:
        make_exception: from a signal's number to what is raised where the main thread stands.
        names: of the signals; SIGTERM, which ``request`` needs, is always one.

    Attributes:
        received: number of the first signal; None before.
        received_s: when it came, ``time.time()``; None before.
        is_forced: a second one came.
        reason: why the program itself asked for the end (``request``); None where somebody else did.
    """

    def __init__(self, make_exception: Callable[[int], BaseException], names: Iterable[str] = SIGNALS) -> None:
        self.received: int | None = None
        self.received_s: float | None = None
        self.reason: str | None = None
        self.is_forced = False
        self._make_exception = make_exception
        self._numbers = list(dict.fromkeys([*(signal.Signals[name] for name in names), signal.SIGTERM]))
        self._previous: dict[int, Any] = {}
        self._is_ending = False
        self._is_told = False  # the main thread has been told of the first signal
        self._announced = threading.Lock()  # taken once, by whoever announces
        self._is_over = threading.Event()
        self._forces: list[Callable[[], None]] = []
        self._announce: Callable[[int], None] | None = None

    @property
    def names(self) -> list[str]:
        """Of the signals that end the program."""
        return [signal.Signals(number).name for number in self._numbers if not self._is_ignored(number)]

    @property
    def is_ending(self) -> bool:
        """Whether ``end`` was called."""
        return self._is_ending

    def __enter__(self) -> Interruption:
        self._previous = {number: signal.getsignal(number) for number in self._numbers}
        self.install()
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        self._previous_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="psengine-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        self._is_over.set()
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():  # it may stand in an announcement that nobody reads
            os.close(self._reader)
            os.close(self._writer)

    def install(self) -> None:
        """Take the signals, again where somebody else took them in between."""
        for number in self._numbers:
            if number == signal.SIGTERM or not self._is_ignored(number):
                signal.signal(number, self._on_signal)

    def on_first(self, announce: Callable[[int], None]) -> None:
        """Call ``announce`` with the number when the first signal arrives."""
        self._announce = announce

    def on_force(self, force: Callable[[], None]) -> None:
        """Call ``force`` at every signal after the first: it ends at once what it stands for."""
        self._forces.append(force)

    def request(self, reason: str) -> None:
        """From any thread: end as after SIGTERM, because of ``reason``. The first reason counts."""
        if self.reason is None and self.received is None:
            self.reason = reason
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def note(self, number: int) -> None:
        """The main thread was told of a first signal, by somebody else's handler."""
        self._is_told = True
        self.install()
        self._record(number)

    def end(self) -> None:
        """All that is left is to tidy up: a first signal is noted from here on, and interrupts nothing."""
        self._is_ending = True

    def _is_ignored(self, number: int) -> bool:
        return self._previous.get(number) is signal.SIG_IGN

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_ignored(number) and self.reason is None:
            return
        if not self._is_told:
            self.note(number)
            if not self._is_ending:
                raise self._make_exception(number)
            return
        if not self._is_repeated(number, self.received or 0, time.time() - (self.received_s or 0.0)):
            self._force()

    def _is_repeated(self, number: int, first: int, since_s: float) -> bool:
        """Whether a signal is the first one once more; what we sent ourselves may be answered by any."""
        return since_s < REPEAT_S and (number == first or self.reason is not None)

    def _record(self, number: int) -> None:
        if self.received is None:
            self.received_s = time.time()
            self.received = number
        if self._announced.acquire(blocking=False) and self._announce is not None and self.reason is None:
            self._announce(number)

    def _force(self) -> None:
        self.is_forced = True
        for force in self._forces:
            force()

    def _listen(self) -> None:
        """Do what the main thread does not come to do."""
        first = 0
        first_s = forced_s = leave_s = math.inf
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        while not self._is_over.is_set():
            heard = poll.poll(1000 * _LISTEN_S)
            now = time.monotonic()
            for number in os.read(self._reader, 64) if heard else b"":
                if number not in self._numbers or (self._is_ignored(number) and self.reason is None):
                    continue
                if not first:
                    first, first_s = number, now
                elif forced_s == math.inf and not self._is_repeated(number, first, now - first_s):
                    forced_s = now
            if self.received is None and now > first_s + UNHEARD_S:
                self._record(first)
            if not self.is_forced and now > forced_s + UNHEARD_S:
                self._force()
                leave_s = now + LEAVE_S
            if now > leave_s and not self._is_over.is_set():
                os._exit(128 + (self.received or first))


def kill_group(leader: int, number: int) -> None:
    """Signal the process group of ``leader``; nothing where it is gone."""
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):
        return
