"""From seconds to figures: medians with their spread, ratios by pair. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spread:
    """A median with the 10th and 90th percentile, and the least value."""

    median: float
    low: float
    high: float
    least: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        ordered = sorted(values)
        low, high = (ordered[round(fraction * (len(ordered) - 1))] for fraction in (0.1, 0.9))
        return cls(statistics.median(ordered), low, high, ordered[0])

    def text(self) -> str:
        """A ratio's, with two or three significant digits."""
        return f"{number(self.median)} ({number(self.low)}-{number(self.high)})"

    def time_text(self) -> str:
        """Seconds in the median's unit."""
        unit, factor = unit_of(self.median)
        return f"{number(factor * self.median)} ({number(factor * self.low)}-{number(factor * self.high)}) {unit}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Candidates that took turns.

    Attributes:
        labels: what the case is, in the order of the table's columns: {"ranks": 2, "size": "25 MB"}.
        seconds: of each candidate, one value a round; of several ranks the slowest one's.
    """

    labels: Mapping[str, Any]
    seconds: Mapping[str, Sequence[float]]

    def ratios(self, numerator: str, denominator: str) -> Spread | None:
        """Of two candidates' times within a round; None where one of them is missing."""
        if numerator not in self.seconds or denominator not in self.seconds:
            return None
        return Spread.of(n / d for n, d in zip(self.seconds[numerator], self.seconds[denominator], strict=True))

    def overhead(self, candidate: str, baseline: str | None) -> Spread | None:
        """The seconds that a candidate adds to the baseline within a round; None where there is none to add to."""
        if baseline is None or candidate == baseline or not {candidate, baseline} <= set(self.seconds):
            return None
        return Spread.of(s - b for s, b in zip(self.seconds[candidate], self.seconds[baseline], strict=True))


def slowest(per_rank: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Seconds of each candidate and round on the slowest rank: the next step cannot begin earlier."""
    return {name: [max(turn) for turn in zip(*(rank[name] for rank in per_rank), strict=True)] for name in per_rank[0]}


def unit_of(seconds: float) -> tuple[str, float]:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if abs(seconds) * factor >= 1:
            return unit, factor
    return "µs", 1e6


def duration(seconds: float) -> str:
    unit, factor = unit_of(seconds)
    return f"{number(factor * seconds)} {unit}"


def number(value: float) -> str:
    """Three significant digits, never an exponent."""
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}" if abs(value) >= 0.001 else f"{value:.1g}"
