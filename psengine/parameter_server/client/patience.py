"""When to ask again what became of something, and when to give it up, on a link of any speed. Pure.

    asked ── 1 s ── asked ── 2 s ── asked ── 4 s ── ... ── the answer took 5 s: next time not before 10 s

A question is a few bytes, but waits behind the payloads before it. So the time that its answer takes is what the link
needs for the bytes under way on it, both ways: the measure of what is late.
"""

from __future__ import annotations

PROBE_S = 1.0
# However slow a link was: what was lost on it meanwhile is to be found.
MAX_WAIT_S = 30.0


class Patience:
    """One link's.

    Attributes:
        round_trip_s: what the last question took; less, where something asked later was answered sooner.
    """

    def __init__(self) -> None:
        self.round_trip_s = 0.0

    def note_question(self, took_s: float) -> None:
        """A question was answered."""
        self.round_trip_s = took_s

    def note_answer(self, took_s: float) -> None:
        """Something else was: a question would not have taken longer."""
        self.round_trip_s = min(self.round_trip_s, took_s)

    def wait_s(self, unanswered: int = 0) -> float:
        """How long to wait before the next question, after so many without an answer."""
        first_s = max(PROBE_S, min(MAX_WAIT_S, 2 * self.round_trip_s))
        return min(first_s * 2.0 ** min(unanswered, 16), max(MAX_WAIT_S, first_s))
