"""Servers that do not answer for long, as lines of the log: who is asked, for what, whom it waits for. Pure.

    asked ──────── stall_s ──────── 2 stall_s ──────────────────── 4 stall_s ── ...  answered
                   one line         one more                       one more          it goes on

One stall is one line, however many chunks and shards are late: the one asked longest ago stands for all.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from psengine.parameter_server.client.link import Link
from psengine.parameter_server.client.operation import Operation, Push
from psengine.tracing.observers import Observer
from psengine.tracing.stall_inspector import StallSchedule

logger = logging.getLogger(__name__)

# Often enough for whole seconds, seldom enough to cost nothing. A stall under way is looked at each time, for its end.
LOOK_S = 1.0


class StallWatch:
    """Looks at what is under way, and says what takes too long.

    Args:
        stall_s: how long is too long; 0 says nothing ever.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._look_s = min(LOOK_S, stall_s / 4)
        self._next_look_s = 0.0
        # Of the stall under way: since when, when it is mentioned again, and what was mentioned last.
        self._since_s = 0.0
        self._schedule: StallSchedule | None = None
        self._what = ""

    @Observer("in the log, what this client waits for")
    def look(self, who: str, links: Sequence[Link], now_s: float) -> None:
        """Log where a stall began, lasts or has ended.

        Args:
            who: is waiting, as lines begin: "worker 1 of job 'default'".
            links: to all shards.
            now_s: the time.
        """
        if not self._stall_s or (now_s < self._next_look_s and self._schedule is None):
            return
        self._next_look_s = now_s + self._look_s
        waits = [(link, operation) for link in links if (operation := link.oldest()) is not None]
        late = [wait for wait in waits if now_s - wait[1].submitted_s >= self._stall_s]
        if not late:
            if self._schedule is not None:
                logger.warning("%s waits no longer for %s; it took %.1f s", who, self._what, now_s - self._since_s)
            self._schedule = None
            return
        link, operation = min(late, key=lambda wait: wait[1].submitted_s)
        if self._schedule is None:
            self._since_s, self._schedule = operation.submitted_s, StallSchedule(self._stall_s)
        if not self._schedule.is_due(now_s - self._since_s):
            return
        self._what = f"{link.address}: {operation.describe()}"
        logger.warning(
            "%s has waited %.1f s for %s%s. %s",
            who,
            now_s - operation.submitted_s,
            self._what,
            _others(link, late),
            _reason(link, operation, now_s),
        )


def _others(link: Link, late: Sequence[tuple[Link, Operation]]) -> str:
    others = []
    if (more := len(link.open_operations()) - 1) > 0:
        others.append(f"{more} more there")
    if addresses := [other.address for other, _ in late if other is not link]:
        others.append("what was asked of " + ", ".join(addresses[:8]) + (", ..." if len(addresses) > 8 else ""))
    return f" (and {' and '.join(others)})" if others else ""


def _reason(link: Link, operation: Operation, now_s: float) -> str:
    if isinstance(operation, Push) and operation.waiting_for:
        return f"The server has it, and waits for workers {operation.waiting_for}: are they stuck, dead or slow?"
    if link.is_paused:
        return "This worker is introducing itself to the servers again."
    if isinstance(operation, Push) and not operation.is_sent:
        return "It could not be sent yet: there is no connection, or too much is under way to that server."
    if link.last_heard_s is None:
        return "The server was never heard from: is it running, and reachable from this host?"
    return f"The server was last heard from {now_s - link.last_heard_s:.1f} s ago."
