"""When to ask about an operation that has no answer, on a link of any speed. Pure.

    asked ── 1 s ── asked ── 2 s ── asked ── 4 s ── ... ── the answer took 5 s: next time wait 10 s

A question is a few bytes, but waits behind the payloads before it: the time until its answer measures how long the
bytes in flight take, both ways.
"""

from __future__ import annotations

PROBE_S = 1.0
# Also on a slow link a loss is found after so long.
MAX_WAIT_S = 30.0


class Patience:
    """One link's.

    Attributes:
        round_trip_s: seconds of the last question; fewer where a later operation was answered sooner.
    """

    def __init__(self) -> None:
        self.round_trip_s = 0.0

    def note_question(self, took_s: float) -> None:
        """A question was answered."""
        self.round_trip_s = took_s

    def note_answer(self, took_s: float) -> None:
        """Another operation was answered: a question would not have taken longer."""
        self.round_trip_s = min(self.round_trip_s, took_s)

    def wait_s(self, unanswered: int = 0) -> float:
        """How long to wait before the next question, after so many without an answer."""
        first_s = max(PROBE_S, min(MAX_WAIT_S, 2 * self.round_trip_s))
        return min(first_s * 2.0 ** min(unanswered, 16), max(MAX_WAIT_S, first_s))
