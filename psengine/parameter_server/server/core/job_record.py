"""For people: who came to a job, who is gone and why, which gradients did not count."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from psengine.parameter_server.server.core.membership import Member
from psengine.parameter_server.status_model import Departed
from psengine.tracing.logging_format import RateLimit

logger = logging.getLogger(__name__)

MAX_DEPARTED = 20
# Of workers that are out: a whole host's fit in.
LINES_INTERVAL_S = 10.0
MAX_LINES = 128


class JobRecord:
    """One job's, at one shard.

    Args:
        job: its name.
        note: told of what happens, see ``EventLog.note``.
        wall_clock_s: dates those that are gone.

    Attributes:
        departed: workers that are gone, the latest last.
    """

    def __init__(self, job: str, note: Callable[..., None], wall_clock_s: Callable[[], float]) -> None:
        self.departed: deque[Departed] = deque(maxlen=MAX_DEPARTED)
        self._job = job
        self._note_event = note
        self._wall_clock_s = wall_clock_s
        self._lines = RateLimit(LINES_INTERVAL_S, MAX_LINES)

    def note(self, kind: str, member: Member, text: str) -> None:
        """An event of a worker, whose name ``text`` follows."""
        name = f"worker {member.rank} (process {member.pid} on {member.host})"
        self._note_event(kind, name + text, job=self._job, worker=member.rank)

    def went(self, member: Member, reason: str, why: str, step: int) -> None:
        """A worker is gone: ``reason`` is "left", "evicted" or "fenced", ``why`` is in words, ``step`` its last."""
        unix_s = round(self._wall_clock_s(), 3)
        self.departed.append(Departed(rank=member.rank, host=member.host, reason=reason, unix_s=unix_s, step=step))
        self.note(reason, member, f" {'left' if reason == 'left' else f'was {reason}'}: {why}")

    def out(self, member: Member, why: str, now_s: float) -> None:
        """The others go on without a worker."""
        # Anybody who reaches the server can come and go: a line for each would fill the disk.
        suppressed = self._lines.allows(now_s)
        if suppressed is None:
            return
        logger.warning(
            "job %r: worker %d (process %d on %s) is out: %s; the others go on without it%s",
            self._job,
            member.rank,
            member.pid,
            member.host,
            why,
            f" ({suppressed} more unmentioned)" if suppressed else "",
        )

    def lost(self, updates: int, chunks: int) -> None:
        """The server went back to a snapshot that lacks what workers know was acknowledged."""
        text = (
            f"{updates} updates of {chunks} chunks are lost: workers had them acknowledged, and the snapshot that this"
            " server started from is older"
        )
        logger.warning("job %r: %s", self._job, text)
        self._note_event("lost", text, job=self._job)
