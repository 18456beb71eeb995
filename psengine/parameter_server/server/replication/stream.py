"""The records of one shard on their way to the server's follower. No socket, no clock.

    shard      append ── append ── append ──────────► answers, held
    stream        └─ send, a window at most ─┐            ▲
    follower                    check, apply, log if it has one ─ KEPT n: it has all records below n

A follower first gets a snapshot. Once it has that, answers wait for it. Once it also has what came meanwhile, it has
*caught up*: it has all that anybody was told, and may be recorded as in sync. A follower that is lost is still waited
for until ``release``: somebody has to see to it that it cannot lead any more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from psengine.parameter_server.server.log.records import Record, encode

# What the follower may not have acknowledged: two steps of a large model are under way.
WINDOW_BYTES, WINDOW = 64 << 20, 4096
# Records that wait for the window, beside a snapshot: a follower that is so far behind does not catch up.
QUEUE_BYTES = 1 << 30
LARGE_BYTES = 4096


class Stream:
    """Of one shard, to one follower after the other; used in the shard's thread. A sink of ``HeldAnswers``.

    Records are numbered over all followers, those of snapshots too.

    Args:
        send: sends a RECORD to a connection: number of the next record of the shard, and the frames behind its header,
            which do not change.
        tell: told of the follower of this epoch that it has caught up (""), or why it is lost.
        lease_s: how long it may be silent.

    Attributes:
        end: number of the next record.
        follower: its epoch; 0 without one.
        is_waited_for: answers wait for it.
        failure: none of its failures ends the shard.
    """

    failure = ""

    def __init__(
        self, send: Callable[[bytes, int, Sequence[Any]], None], tell: Callable[[int, str], None], lease_s: float
    ) -> None:
        self.end = self.follower = 0
        self.is_waited_for = False
        self._send, self._tell, self._lease_s = send, tell, lease_s
        self._route = b""
        self._kept = 0
        self._begin = 0  # behind the snapshot
        self._mark: float | None = None  # all that was told before answers waited is below; then infinite
        self._waiting: deque[tuple[int, Record]] = deque()
        self._sent: deque[tuple[int, int]] = deque()  # numbers and bytes
        self._waiting_bytes = self._sent_bytes = self._most_bytes = 0
        self._heard_s = self._spoke_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether it takes records."""
        return bool(self.follower) or self.is_waited_for

    @property
    def durable(self) -> int:
        """Answers that wait for this number may leave."""
        return self._kept if self.is_waited_for else self.end

    @property
    def lag(self) -> int:
        """How many records the follower has not acknowledged."""
        return self.end - self._kept if self.is_open else 0

    # ---- what the shard does -----------------------------------------------------------------------------------

    def open(self, follower: int, route: bytes, snapshot: Iterable[Record], now_s: float) -> None:
        """A follower begins, by a snapshot of the shard as it is at this record."""
        self.follower, self._route, self._heard_s, self._spoke_s = follower, route, now_s, now_s
        self._most_bytes, self._mark = QUEUE_BYTES, None
        for record in snapshot:
            self._most_bytes += record.size_bytes
            self.append(record)
        self._begin = self.end

    def append(self, record: Record) -> None:
        """The shard has changed."""
        self.end += 1
        if self.follower:
            record = record.whole()
            self._waiting.append((self.end - 1, record))
            self._waiting_bytes += record.size_bytes
        if self._waiting_bytes > self._most_bytes:
            self.lose(f"it is too slow: {self._waiting_bytes >> 20} MiB wait for it")

    def flush(self) -> None:
        """Send what waits, as far as the window goes: small records together, and a large one at the end."""
        group: list[Any] = []
        while self._waiting and self._sent_bytes < WINDOW_BYTES and len(self._sent) < WINDOW:
            number, record = self._waiting.popleft()
            self._waiting_bytes -= record.size_bytes
            self._sent_bytes += record.size_bytes
            self._sent.append((number, record.size_bytes))
            group += filter(len, encode(record, number))
            if record.size_bytes > LARGE_BYTES or not self._waiting:
                self._send(self._route, self.end, group)
                group = []
        if group:
            self._send(self._route, self.end, group)

    # ---- what the follower does --------------------------------------------------------------------------------

    def kept(self, route: bytes, number: int, now_s: float) -> None:
        """KEPT came: it has all records below ``number``."""
        if not self.follower or route != self._route or number > self.end:
            return
        self._heard_s = now_s
        while self._sent and self._sent[0][0] < number:
            self._sent_bytes -= self._sent.popleft()[1]
        self.flush()
        if number < self._begin:
            return
        self._kept, self.is_waited_for = number, True
        if self._mark is None:
            self._mark = self.end
        if number >= self._mark:
            self._mark = math.inf
            self._tell(self.follower, "")

    def tick(self, now_s: float, is_connected: Callable[[bytes], bool]) -> None:
        """Some time has passed."""
        if not self.follower:
            return
        self.flush()
        if not is_connected(self._route):
            self.lose("its connection has ended")
        elif now_s > self._heard_s + self._lease_s:
            self.lose(f"it was silent for {self._lease_s:g} s")
        elif now_s >= self._spoke_s + self._lease_s / 5:
            self._spoke_s = now_s
            self._send(self._route, self.end, [])

    def lose(self, why: str) -> None:
        """There is no such follower any more."""
        if not self.follower:
            return
        follower, self.follower = self.follower, 0
        self._waiting.clear()
        self._sent.clear()
        self._waiting_bytes = self._sent_bytes = 0
        self._tell(follower, why)

    def release(self) -> None:
        """The follower that was lost can never lead: nobody waits for it."""
        if not self.follower:
            self.is_waited_for = False
