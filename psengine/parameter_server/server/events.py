"""What happened to a server, its jobs and workers, for people: a short list, and lines in the server's log."""

from __future__ import annotations

import logging
import threading
import time

from psengine.parameter_server.status_model import Event
from psengine.tracing.logging_format import RateLimit

logger = logging.getLogger(__name__)

MAX_EVENTS = 200
# A refused gradient comes with hundreds of chunks a second, and a disk stays full for days: the last one stays, with
# how many were like it.
_MERGED = frozenset({"refused", "memory", "stood_still", "snapshot", "snapshot_failed", "waits"})
_LOGGED = {
    **dict.fromkeys(("snapshot", "leads", "follower"), logging.INFO),
    **dict.fromkeys(("evicted", "fenced", "lost", "stood_still", "log_room", "draining"), logging.WARNING),
    **dict.fromkeys(("follower_lost", "anew", "waits"), logging.WARNING),
    **dict.fromkeys(("snapshot_failed", "log_low", "memory"), logging.ERROR),
    **dict.fromkeys(("log_full", "log_failed"), logging.CRITICAL),
}
# Anybody who reaches the server can come and go: a line for each would fill the disk. A whole host's workers fit in.
LINES_INTERVAL_S = 10.0
MAX_LINES = 128


class EventLog:
    """The last ``MAX_EVENTS`` events; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines = RateLimit(LINES_INTERVAL_S, MAX_LINES)
        # By where they come from, in the order of their times: the last event, and how many there were.
        self._events: dict[object, tuple[Event, int]] = {}

    def note(self, kind: str, text: str, *, job: str = "", worker: int | None = None) -> None:
        """Something happened; the arguments are those of ``Event``."""
        source = (kind, job, worker) if kind in _MERGED else object()
        with self._lock:
            _, count = self._events.pop(source, (None, 0))
            if count and kind != "snapshot":
                text = f"{text}; {count} like it before"
            self._events[source] = Event(round(time.time(), 3), kind, job, worker, text), count + 1
            if len(self._events) > MAX_EVENTS:
                del self._events[next(iter(self._events))]
            if (level := _LOGGED.get(kind)) is None:
                return
            left_out = 0 if level > logging.WARNING else self._lines.allows(time.monotonic())
            if left_out is not None:
                more = f" ({left_out} lines were left out before)" if left_out else ""
                logger.log(level, "%s%s%s", f"job {job!r}: " if job else "", text, more)

    def events(self) -> tuple[Event, ...]:
        """The newest last."""
        with self._lock:
            return tuple(event for event, _ in self._events.values())
