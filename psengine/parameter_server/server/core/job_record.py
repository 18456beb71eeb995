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

_WORDS = {"left": "left", "evicted": "was evicted", "fenced": "was fenced"}


class JobRecord:
    """One job's, at one shard.

    Args:
        job: its name.
        note: told of what happens, see ``EventLog.note``.
        wall_clock_s: dates those that are gone.
    """

    def __init__(self, job: str, note: Callable[..., None], wall_clock_s: Callable[[], float]) -> None:
        self._job = job
        self._note_event = note
        self._wall_clock_s = wall_clock_s
        self._lines = RateLimit(LINES_INTERVAL_S, MAX_LINES)
        self._departed: deque[Departed] = deque(maxlen=MAX_DEPARTED)

    def joined(self, member: Member, donor: int | None = None) -> None:
        """A worker takes part, perhaps with the state of another."""
        self._note("joined", member, " joined" + ("" if donor is None else f", with the state of worker {donor}"))

    def departed(self, member: Member, reason: str, why: str, step: int) -> None:
        """A worker is gone: ``reason`` is "left", "evicted" or "fenced", ``why`` is in words, ``step`` its last."""
        unix_s = round(self._wall_clock_s(), 3)
        self._departed.append(Departed(rank=member.rank, host=member.host, reason=reason, unix_s=unix_s, step=step))
        self._note(reason, member, f" {_WORDS[reason]}: {why}")

    def out(self, member: Member, why: str, now_s: float) -> None:
        """The others go on without a worker."""
        # Whoever reaches the server can come and go: a line for each would fill the disk.
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

    def refused(self, member: Member, what: str, reason: str) -> None:
        """A gradient was not applied."""
        self._note("refused", member, f": its gradient of {what} was refused ({reason})")

    def late(self, member: Member, step: int) -> None:
        """A gradient came after the average it was for."""
        self._note("late", member, f": its gradient of step {step} came after the others' average")

    def lost(self, updates: int, chunks: int) -> None:
        """The server went back to a snapshot that lacks what workers know was acknowledged."""
        text = (
            f"{updates} updates of {chunks} chunks are lost: workers had them acknowledged, and the snapshot that this"
            " server started from is older"
        )
        logger.warning("job %r: %s", self._job, text)
        self._note_event("lost", text, job=self._job)

    def to_status(self) -> tuple[Departed, ...]:
        """Those that are gone, the latest last."""
        return tuple(self._departed)

    def _note(self, kind: str, member: Member, text: str) -> None:
        name = f"worker {member.rank} (process {member.pid} on {member.host})"
        self._note_event(kind, name + text, job=self._job, worker=member.rank)
