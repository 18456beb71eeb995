"""One worker of the view, as a shard knows it. Pure."""

from __future__ import annotations

from collections import Counter


class Worker:
    """A process, its connection, and what it pushed.

    Attributes:
        incarnation: the process's.
        user_id: its CURVE key; "" without CURVE.
        route: where its answers go; b"" where it has no connection.
        pushes: chunks that it sent.
        discarded: chunks that were "refused", or came "late": after their average.
        step: the last that it pushed.
    """

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.user_id = ""
        self.route = b""
        self._resumed = 0
        self.pushes = self.step = 0
        self.discarded: Counter[str] = Counter()

    def resume(self, route: bytes, request: int) -> None:
        """RESUME came on a connection, b"" if not as a member's; messages of older ones may still be read after it."""
        if request >= self._resumed:
            self.route, self._resumed = route, request
