"""A program that blocks, in a thread of its own which runs only while the simulation waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Cancelled(BaseException):
    """The process was killed: its thread unwinds, and does nothing any more."""


class Baton:
    """Runs ``function``; to the simulation it looks as a ``SteppedFlow``.

    Attributes:
        is_over: it has returned, or raised.
        error: what it raised.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._ready: Callable[[], object] = lambda: True
        self._since_s = float("-inf")
        self._go_on, self._is_back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._is_cancelled = False
        self.is_over = False
        self.error: BaseException | None = None

    def step(self, now_s: float) -> None:
        """Let it run until it waits for something that is not there."""
        while not self.is_over and self._ready():
            self._since_s = now_s
            self._run()

    def _run(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._call, name="simulated worker", daemon=True)
            self._thread.start()
        else:
            self._go_on.release()
        self._is_back.acquire()
        if self.is_over:
            self._thread.join()

    def _call(self) -> None:
        try:
            self._function()
        except Cancelled:
            pass
        except BaseException as error:
            self.error = error
        self.is_over = True
        self._is_back.release()

    def park(self, ready: Callable[[], object]) -> None:
        """Wait until ``ready`` returns something true; it is asked whenever something happens to the process."""
        while self._is_cancelled or not ready():
            if self._is_cancelled:
                raise Cancelled
            self._ready = ready
            self._is_back.release()
            self._go_on.acquire()

    def cancel(self) -> None:
        """The process is killed."""
        self._is_cancelled = True
        if self._thread is not None and not self.is_over:
            self._run()
        self.is_over = True
