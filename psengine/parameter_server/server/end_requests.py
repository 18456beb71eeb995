"""Who may end a server: a signal, the status port, or the end of an embedded server's standard input.

The first SIGTERM or SIGINT ends the server in order. The second ends it at once: what came after the last snapshot is
lost, and no written snapshot is harmed.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from types import FrameType

logger = logging.getLogger(__name__)


class EndRequests:
    """Collects requests from all threads and from signals.

    Attributes:
        stdin_closed: set once standard input is at its end, where ``watch_stdin`` was called.
    """

    def __init__(self) -> None:
        self.stdin_closed = threading.Event()
        self._reasons: SimpleQueue[str] = SimpleQueue()
        self._signals = 0

    def put(self, reason: str) -> None:
        """Ask for the end."""
        self._reasons.put(reason)

    def wait(self, timeout_s: float) -> str:
        """The next reason; "" after the timeout."""
        try:
            return self._reasons.get(timeout=timeout_s)
        except Empty:
            return ""

    @contextmanager
    def handling_signals(self, *, is_embedded: bool) -> Iterator[None]:
        """Take SIGTERM and SIGINT inside; an embedded server leaves SIGINT to the process that started it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        interrupt = signal.SIG_IGN if is_embedded else self._on_signal
        previous = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, self._on_signal),
            signal.SIGINT: signal.signal(signal.SIGINT, interrupt),
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            # Not through logging, which may hold a lock here.
            os.write(2, b"psengine-server: second signal, ending at once\n")
            os._exit(128 + number)
        self.put(signal.Signals(number).name)

    def watch_stdin(self) -> None:
        """Set ``stdin_closed`` once standard input is at its end."""
        threading.Thread(target=self._read_stdin, name="psengine-stdin", daemon=True).start()

    def _read_stdin(self) -> None:
        try:
            while os.read(0, 4096):
                pass
        except OSError as error:
            logger.warning("standard input cannot be read (%s): taken for closed", error)
        self.stdin_closed.set()
