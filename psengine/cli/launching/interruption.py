"""Ctrl-C and its like: the first signal asks for the end, the second forces it.

The handlers only take notes, so that no exception is raised in the middle of anything. The main thread polls the notes.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

# Wrappers (uv run, srun) pass on what the terminal has sent to the whole group: one Ctrl-C arrives twice.
REPEAT_S = 1.0
# How long the program may take to end after the second signal.
LEAVE_S = 4.0


class Interruption:
    """Notes the signals that end the program. A context manager.

    A signal that was ignored when the block began (nohup, a shell's background job) stays ignored.

    Args:
        names: of the signals; SIGTERM is always one.

    Attributes:
        received: number of the first signal; None before.
        received_s: when the first signal came, ``time.time()``; 0 before.
        is_forced: a second signal came.
        on_force: called at the second signal, in its handler: ends the workers at once.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.received: int | None = None
        self.received_s = 0.0
        self.is_forced = False
        self.on_force: Callable[[], None] = lambda: None
        self._numbers = {signal.SIGTERM, *(signal.Signals[name] for name in names)}
        self._previous: dict[int, Any] = {}
        self._leave: threading.Timer | None = None

    def __enter__(self) -> Interruption:
        for number in self._numbers:
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._leave is not None:
            self._leave.cancel()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self.received_s = number, time.time()
        elif not self.is_forced and (number != self.received or time.time() - self.received_s >= REPEAT_S):
            self.is_forced = True
            # The main thread may be blocked in a write to a pager that does not read.
            self._leave = threading.Timer(LEAVE_S, os._exit, [128 + self.received])
            self._leave.daemon = True
            self._leave.start()
            self.on_force()
