"""Log lines about servers that do not answer for long: who asks, for what, and for whom the server waits. Pure.

    asked ──────── stall_s ──────── 2 stall_s ──────── 3 stall_s ── ...  answered
                   one line         one more           one more          the end

However many operations are late, a stall has one line: that of the oldest.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from psengine.parameter_server.client.channel import Channel
from psengine.tracing.observers import observing

logger = logging.getLogger(__name__)


class StallWatch:
    """Reports the operations that take too long.

    Args:
        stall_s: how long is too long; 0 reports nothing.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        # Of the stall under way: when it began, when its next line is due, and the operation in its last line.
        self._since_s = self._next_line_s = 0.0
        self._what = ""

    @observing("in the log, what this client waits for")
    def look(self, who: object, channels: Sequence[Channel], now_s: float) -> None:
        """Log where a stall began, lasts or has ended.

        Args:
            who: the client; lines begin with its ``str``, such as "worker 1 of job 'default'".
            channels: to the coordinator, and to all shards.
            now_s: the time.
        """
        waits = [(one.submitted_s, channel) for channel in channels if (one := channel.oldest()) is not None]
        since_s, channel = min(waits, key=lambda wait: wait[0], default=(now_s, None))
        if not self._stall_s or channel is None or now_s - since_s < self._stall_s:
            if self._what:
                logger.warning("%s waits no longer for %s; it took %.1f s", who, self._what, now_s - self._since_s)
            self._what = ""
            return
        if not self._what:
            self._since_s = since_s
        elif now_s < self._next_line_s:
            return
        self._next_line_s = now_s + self._stall_s
        operation = channel.oldest()
        assert operation is not None
        self._what = f"{channel.name}: {operation.describe()}"
        others = sum(len(one.open_operations()) for one in channels) - 1
        logger.warning(
            "%s has waited %.1f s for %s%s, and gives up in %.0f s. %s",
            who,
            now_s - since_s,
            self._what,
            f" (and {others} more)" if others else "",
            max(0.0, operation.deadline_s - now_s),
            channel.why_late(operation, now_s),
        )
