"""What happened to a server and its workers, for people: a short list."""

from __future__ import annotations

import re
import threading
from collections import deque

from psengine.parameter_server.server.core.surroundings import Clocks
from psengine.parameter_server.status_model import Event

MAX_EVENTS = 200
# A refused gradient comes with hundreds of chunks a second: one event tells, the next says how many followed.
REPEAT_S = 30.0
# A disk stays full for days, and every interval's snapshot fails: one event an hour leaves room for others.
SNAPSHOT_FAILED_REPEAT_S = 3600.0
_REPEATING = {
    **dict.fromkeys(("refused", "late", "memory", "stood_still", "torn"), REPEAT_S),
    "snapshot_failed": SNAPSHOT_FAILED_REPEAT_S,
}
_MAX_REMEMBERED = 1024
_NUMBER = re.compile(r"\d+")

KINDS = frozenset(
    {"started", "restored", "joined", "left", "evicted", "fenced", "refused", "late", "lost", "torn", "snapshot",
     "snapshot_failed", "memory", "stood_still"}
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
