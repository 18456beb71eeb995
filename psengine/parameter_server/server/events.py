"""What happened to a server, its jobs and workers, for people: short lists, and lines in the log."""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from collections.abc import Callable

from psengine.parameter_server.server.coordinator.workers import Worker
from psengine.parameter_server.server.interfaces import Clocks
from psengine.parameter_server.status_model import Departed, Event
from psengine.tracing.logging_format import RateLimit

logger = logging.getLogger(__name__)

MAX_EVENTS = 200
# A refused gradient comes with hundreds of chunks a second: one event tells, the next says how many followed.
REPEAT_S = 30.0
# A disk stays full for days, and every interval's snapshot fails: one event an hour leaves room for others.
SNAPSHOT_FAILED_REPEAT_S = 3600.0
_REPEATING = {
    **dict.fromkeys(("refused", "late", "memory", "stood_still"), REPEAT_S),
    "snapshot_failed": SNAPSHOT_FAILED_REPEAT_S,
}
_MAX_REMEMBERED = 1024
MAX_DEPARTED = 20
# Of workers that are out: a whole host's fit in.
LINES_INTERVAL_S = 10.0
MAX_LINES = 128
_NUMBER = re.compile(r"\d+")

KINDS = frozenset(
    {"started", "restored", "joined", "left", "evicted", "fenced", "refused", "late", "lost", "snapshot",
     "snapshot_failed", "memory", "stood_still", "draining", "log_low", "log_full", "log_room", "log_failed"}
)  # fmt: skip


class EventLog:
    """The last ``MAX_EVENTS`` events; thread-safe.

    Refusals and the like of one worker, or of all strangers to a job, are let through once in ``REPEAT_S``, snapshots
    that fail for one cause once in ``SNAPSHOT_FAILED_REPEAT_S``; of snapshots in a row the last one stays.
    """

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        # (kind, job, worker; None for strangers, cause) -> (when the next may follow, how many were left out)
        self._repeats: dict[tuple[str, str, int | None, str], tuple[float, int]] = {}

    def note(
        self, kind: str, text: str, *, job: str = "", worker: int | None = None, is_stranger: bool = False
    ) -> None:
        """Something happened; the arguments are those of ``Event``.

        ``is_stranger``: ``worker`` is the rank that a peer claims which is no member, perhaps a new one each time.
        """
        assert kind in KINDS, kind
        # The same disk is as full whatever the number of the generation.
        cause = _NUMBER.sub("", text) if kind == "snapshot_failed" else ""
        source = (kind, job, None if is_stranger else worker, cause)
        with self._lock:
            if kind in _REPEATING:
                now_s = self._clocks.measure_s()
                next_s, left_out = self._repeats.get(source, (float("-inf"), 0))
                if now_s < next_s:
                    self._repeats[source] = (next_s, left_out + 1)
                    return
                if len(self._repeats) >= _MAX_REMEMBERED:
                    self._repeats.clear()
                self._repeats[source] = (now_s + _REPEATING[kind], 0)
                if left_out:
                    text = f"{text}; {left_out} like it before"
            elif kind == "snapshot" and self._events and self._events[-1].kind == kind:
                self._events.pop()  # a long run's log would be nothing else
            self._events.append(Event(round(self._clocks.wall_s(), 3), kind, job, worker, text))

    def events(self) -> tuple[Event, ...]:
        """The newest last."""
        with self._lock:
            return tuple(self._events)


class JobRecord:
    """One job's; ``note``: see ``EventLog.note``."""

    def __init__(self, job: str, note: Callable[..., None], wall_clock_s: Callable[[], float]) -> None:
        self.departed: deque[Departed] = deque(maxlen=MAX_DEPARTED)  # workers that are gone, the latest last
        self._job = job
        self._note_event = note
        self._wall_clock_s = wall_clock_s
        self._lines = RateLimit(LINES_INTERVAL_S, MAX_LINES)

    def note(self, kind: str, worker: Worker, text: str) -> None:
        """An event of a worker, whose name ``text`` follows."""
        self._note_event(kind, _name(worker) + text, job=self._job, worker=worker.rank)

    def went(self, worker: Worker, reason: str, why: str, step: int) -> None:
        """A worker is gone: ``reason`` is "left", "evicted" or "fenced", ``why`` is in words, ``step`` its last."""
        unix_s = round(self._wall_clock_s(), 3)
        self.departed.append(Departed(rank=worker.rank, host=worker.host, reason=reason, unix_s=unix_s, step=step))
        self.note(reason, worker, f" {'left' if reason == 'left' else f'was {reason}'}: {why}")

    def out(self, worker: Worker, why: str, now_s: float) -> None:
        """The others go on without a worker."""
        # Anybody who reaches the server can come and go: a line for each would fill the disk.
        if (suppressed := self._lines.allows(now_s)) is not None:
            more = f" ({suppressed} more unmentioned)" if suppressed else ""
            text = "job %r: %s is out: %s; the others go on without it%s"
            logger.warning(text, self._job, _name(worker), why, more)

    def lost(self, updates: int, shard: int) -> None:
        """A server went back to a snapshot that lacks what workers know was acknowledged."""
        text = (
            f"{updates} updates of each chunk of shard {shard} are lost: workers had them acknowledged, and the"
            " snapshot that its server started from is older"
        )
        logger.warning("job %r: %s", self._job, text)
        self._note_event("lost", text, job=self._job)


def _name(worker: Worker) -> str:
    return f"worker {worker.rank} (process {worker.pid} on {worker.host})"
