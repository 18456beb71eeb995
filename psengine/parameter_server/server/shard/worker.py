"""One worker of the view, as a shard knows it: its connection, and what its steps cost here. Pure.

worker   push ─────────┐                             ┌──► answer
shard                  ├─ apply ─┤├─ held for others ┤          apply_s, held_s: means of the last steps
"""

from __future__ import annotations

from collections import Counter, deque

# Means are taken over so many steps.
WINDOW_STEPS = 32


class Worker:
    """See the module's text.

    Attributes:
        incarnation: the process's.
        user_id: its CURVE key; "" without CURVE.
        route: where its answers go; b"" where it has no connection.
        pushes: chunks that it sent.
        discarded: chunks that were "refused", or came "late": after their average.
        step: the last that it pushed.
        held: by chunk, the step whose answer is held, and when its push came.
    """

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.user_id = ""
        self.route = b""
        self._resumed = 0
        self.pushes = self.step = 0
        self.discarded: Counter[str] = Counter()
        self.held: dict[int, tuple[int, float]] = {}
        # Per step: seconds of work, and of the longest hold.
        self._costs: deque[list[float]] = deque(maxlen=WINDOW_STEPS)

    def resume(self, route: bytes, request: int) -> None:
        """RESUME came on a connection, b"" if not as a member's; messages of older ones may still be read after it."""
        if request >= self._resumed:
            self.route, self._resumed = route, request

    def heard(self, route: bytes) -> None:
        """It said something, perhaps before RESUME."""
        if not self._resumed:
            self.route = route

    def pushed(self, key: int, step: int, now_s: float) -> None:
        """A push came, and no answer to it has left."""
        if step > self.step or not self._costs:
            self.step = max(self.step, step)
            self._costs.append([0.0, 0.0])
        self.held[key] = step, now_s

    def worked(self, seconds: float) -> None:
        """Work for a step that it takes part in."""
        if self._costs:
            self._costs[-1][0] += seconds

    def answered(self, key: int, step: int, now_s: float) -> None:
        """An answer leaves."""
        held = self.held.get(key)
        if held is not None and held[0] == step:
            del self.held[key]
            self._costs[-1][1] = max(self._costs[-1][1], now_s - held[1])

    def costs_s(self) -> tuple[float | None, float | None]:
        """(work, longest hold) of a step, in seconds; None before the first."""
        if not self._costs:
            return None, None
        work, hold = (sum(parts) / len(self._costs) for parts in zip(*self._costs, strict=True))
        return round(work, 6), round(hold, 6)
