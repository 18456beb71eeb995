"""Log lines about servers that do not answer for long: who asks, for what, and for whom the server waits. Pure.

    asked ──────── stall_s ──────── 2 stall_s ──────── 3 stall_s ── ...  answered
                   one line         one more           one more          the end

However many operations are late, a stall has one line: that of the oldest.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from psengine.parameter_server.client.channel import Channel
from psengine.tracing.observers import Observer

logger = logging.getLogger(__name__)

# How often to look for a new stall; one under way is looked at every time, for its end.
LOOK_S = 1.0


class StallWatch:
    """Reports the operations that take too long.

    Args:
        stall_s: how long is too long; 0 reports nothing.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._look_s = min(LOOK_S, stall_s / 4)
        self._next_look_s = 0.0
        # Of the stall under way: when it began, when its next line is due, and the operation in its last line.
        self._since_s = 0.0
        self._next_line_s = 0.0
        self._what = ""

    @Observer("in the log, what this client waits for")
    def look(self, who: object, channels: Sequence[Channel], now_s: float) -> None:
        """Log where a stall began, lasts or has ended.

        Args:
            who: the client; lines begin with its ``str``, such as "worker 1 of job 'default'".
            channels: to the coordinator, and to all shards.
            now_s: the time.
        """
        if not self._stall_s or (now_s < self._next_look_s and not self._what):
            return
        self._next_look_s = now_s + self._look_s
        waits = [(link, operation) for link in channels if (operation := link.oldest()) is not None]
        late = [wait for wait in waits if now_s - wait[1].submitted_s >= self._stall_s]
        if not late:
            if self._what:
                logger.warning("%s waits no longer for %s; it took %.1f s", who, self._what, now_s - self._since_s)
            self._what = ""
            return
        link, operation = min(late, key=lambda wait: wait[1].submitted_s)
        if not self._what:
            self._since_s = self._next_line_s = operation.submitted_s
        elif now_s < self._next_line_s:
            return
        self._next_line_s += (now_s - self._next_line_s) // self._stall_s * self._stall_s + self._stall_s
        self._what = f"{link.address}: {operation.describe()}"
        others = []
        if more := len(link.open_operations()) - 1:
            others.append(f"{more} more there")
        if addresses := [other.address for other, _ in late if other is not link]:
            others.append("what was asked of " + ", ".join(addresses[:8]) + (", ..." if len(addresses) > 8 else ""))
        logger.warning(
            "%s has waited %.1f s for %s%s, and gives up in %.0f s. %s",
            who,
            now_s - operation.submitted_s,
            self._what,
            f" (and {' and '.join(others)})" if others else "",
            max(0.0, operation.deadline_s - now_s),
            link.why_late(operation, now_s),
        )
