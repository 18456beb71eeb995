"""Ctrl-C, told apart from the second Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
# Wrappers (uv run, srun) pass on what the terminal has sent to the whole group: one Ctrl-C arrives twice.
REPEAT_S = 1.0


class Interruption:
    """Turns the first signal into an exception in the main thread, and the second into force. A context manager.

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
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

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
        """A first signal came, to somebody else's handler."""
        self.install()
        if self.received is None:
            self.received, self.received_s = number, time.time()
            if self._announce is not None and self.reason is None:
                self._announce(number)

    def end(self) -> None:
        """All that is left is to tidy up: a first signal is noted from here on, and interrupts nothing."""
        self._is_ending = True

    def _is_ignored(self, number: int) -> bool:
        return self._previous.get(number) is signal.SIG_IGN

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_ignored(number) and self.reason is None:
            return
        if self.received is None:
            self.note(number)
            if not self._is_ending:
                raise self._make_exception(number)
            return
        if number == self.received and time.time() - (self.received_s or 0.0) < REPEAT_S:
            return
        self.is_forced = True
        for force in self._forces:
            force()


def kill_group(leader: int, number: int) -> None:
    """Signal the process group of ``leader``; nothing where it is gone."""
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):
        return
