"""Exchanges of chunks on their way to one shard: queued, sent as credit allows, asked about where the answer is late.

    queued (one per key) ── credit ── sent ── wait ── PROBE ┬ MISSING ── sent again
                                                            ├ SENT ───── REPEAT
                                                            └ PENDING ── wait ── PROBE ...

Each copy of a push, and each copy of its answer, begins a round. A probe and its answer carry the number of the round:
an answer about an earlier round proves nothing. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from psengine.errors import PSEngineError
from psengine.parameter_server.client import patience
from psengine.parameter_server.client.operation import Push
from psengine.parameter_server.client.patience import Patience
from psengine.protocol.messages import Message, MessageType

# The socket had no connection; look again at the next tick.
RETRY_S = 0.05
DEFAULT_CREDIT_BYTES = 64 * 1024 * 1024


class Pushes:
    """The pushes of one link.

    Args:
        send: sends a message; False where there is no connection now.
        patience: how long to wait before asking.

    Attributes:
        credit_bytes: how much may be in flight; one push always may.
        is_paused: nothing is sent.
        sent: key -> the chunk's push that was sent and is not answered yet.
        has_failed: the push that ended last had no answer.
    """

    def __init__(self, send: Callable[[Message], bool], patience: Patience) -> None:
        self.credit_bytes = DEFAULT_CREDIT_BYTES
        self.is_paused = True
        self.sent: dict[int, Push] = {}
        self.has_failed = False
        self._send_message = send
        self._patience = patience
        self._answered: dict[int, Push] = {}
        self._lines: dict[int, deque[Push]] = {}
        self._waiting: deque[Push] = deque()
        self._in_flight_bytes = 0

    # ---- sending -----------------------------------------------------------------------------------------------

    def begin(self, push: Push, now_s: float) -> None:
        """Queue a push; it is sent when its turn comes."""
        line = self._lines.get(push.key)
        if line is not None:
            line.append(push)
            return
        self._lines[push.key] = deque((push,))
        self._waiting.append(push)
        self.pump(now_s)

    def pump(self, now_s: float) -> None:
        """Send as many as credit allows."""
        waiting = self._waiting
        while waiting and not self.is_paused:
            size_bytes = waiting[0].size_bytes
            if self._in_flight_bytes and self._in_flight_bytes + size_bytes > self.credit_bytes:
                return
            push = waiting.popleft()
            self.sent[push.key] = push
            self._in_flight_bytes += size_bytes
            self._send(push, now_s)

    def _send(self, push: Push, now_s: float) -> None:
        try:
            push.is_sent = self._send_message(push.message)
        except PSEngineError as error:
            self.fail(push, error, now_s)
        push.unanswered = 0
        push.next_at_s = now_s + (self._wait_s(push) if push.is_sent else RETRY_S)

    def _wait_s(self, push: Push) -> float:
        """How long to wait before a probe: a few fit into the deadline, which PENDING may move."""
        return min(self._patience.wait_s(push.unanswered), max(patience.PROBE_S, push.timeout_s / 4))

    def tick(self, now_s: float) -> None:
        """Ask about the pushes that are late."""
        for push in tuple(self.sent.values()):
            if now_s < push.next_at_s:
                continue
            if push.is_sent:
                self._probe(push, now_s)
            else:
                self._send(push, now_s)

    def _probe(self, push: Push, now_s: float) -> None:
        if not self._ask_about(push, MessageType.PROBE):
            push.next_at_s = now_s + RETRY_S
            return
        if not push.unanswered:
            push.asked_s = now_s
        push.unanswered += 1
        push.next_at_s = now_s + self._wait_s(push)

    def _ask_about(self, push: Push, kind: MessageType) -> bool:
        return self._send_message(Message(kind, key=push.key, sequence=push.sequence, body={"round": push.round}))

    # ---- answers -----------------------------------------------------------------------------------------------

    def find(self, message: Message) -> Push | None:
        """The push under way that ``message`` is about."""
        push = self.sent.get(message.key)
        return push if push is not None and push.sequence == message.sequence else None

    def receive_updated(self, push: Push, message: Message, now_s: float) -> None:
        """The answer came."""
        self.has_failed = False
        if push.finish(message, now_s) is None:
            self._answered[push.key] = push
        self._remove(push, now_s)

    def receive_probed(self, message: Message, now_s: float) -> None:
        """PENDING, MISSING or SENT: the answer to a probe."""
        push = self.find(message)
        if push is None or message.body.get("round", push.round) != push.round:
            return  # about an earlier round
        if push.unanswered:
            self._patience.note_question(now_s - push.asked_s)
        push.unanswered = 0
        push.next_at_s = now_s + self._wait_s(push)
        if message.type is MessageType.PENDING:
            push.waiting_for = message.body.get("waiting_for", [])
            known_bytes, push.arrived_bytes = push.arrived_bytes, message.body.get("arrived_bytes", -1)
            if known_bytes != push.arrived_bytes:  # this push arrived, or more of the others
                push.deadline_s = max(push.deadline_s, now_s + push.timeout_s)
            return
        push.round += 1
        push.waiting_for = None
        if message.type is MessageType.MISSING:
            self._send(push, now_s)
        else:
            self._ask_about(push, MessageType.REPEAT)

    # ---- endings -----------------------------------------------------------------------------------------------

    def fail(self, push: Push, error: PSEngineError, now_s: float) -> None:
        """End a push without an answer."""
        push.fail(error)
        self.has_failed = True
        self._remove(push, now_s)

    def _remove(self, push: Push, now_s: float) -> None:
        if self.sent.get(push.key) is push:
            del self.sent[push.key]
            self._in_flight_bytes -= push.size_bytes
        elif push in self._waiting:
            self._waiting.remove(push)
        line = self._lines[push.key]
        was_first = line[0] is push
        line.remove(push)
        if not line:
            del self._lines[push.key]
        elif was_first:
            self._waiting.append(line[0])
        if self._waiting:
            self.pump(now_s)

    def open(self) -> list[Push]:
        """The pushes that have not ended, by key and then in their order."""
        return [push for line in self._lines.values() for push in line]

    @property
    def open_numbers(self) -> int:
        """The sum of the numbers of the exchanges that have not ended; see HEARTBEAT in docs/protocol.md."""
        return sum(push.sequence for push in self.open())

    def last_answered(self, key: int) -> Push | None:
        """The chunk's push that was answered last."""
        return self._answered.get(key)
