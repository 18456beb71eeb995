"""How much of the exchange hides behind backward: time that the model does not wait for.

The exchange of a rank is the time in which at least one of its buckets, or pushes, is in flight: from the hand-over to
the end of the wait, when the result is known to be here. What of it lies inside this rank's backward is hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Interval = tuple[int, int]


def exchange_and_hidden_ns(exchanges: Iterable[Interval], backwards: Iterable[Interval]) -> tuple[int, int]:
    """Return the length of the exchanges together, and how much of it lies inside the backwards, in nanoseconds."""
    exchanged, inside = _union(exchanges), _union(backwards)
    hidden = 0
    first = 0
    for started, ended in exchanged:
        while first < len(inside) and inside[first][1] <= started:
            first += 1
        for begun, over in inside[first:]:
            if begun >= ended:
                break
            hidden += min(ended, over) - max(started, begun)
    return sum(ended - started for started, ended in exchanged), hidden


def hidden_fraction(processes: Sequence[Mapping[str, Any]]) -> float | None:
    """The fraction over all ranks, from 0 to 1; None where nothing was exchanged, or an earlier version recorded."""
    exchanged = sum(process.get("exchange_ns") or 0 for process in processes)
    hidden = sum(process.get("hidden_exchange_ns") or 0 for process in processes)
    return hidden / exchanged if exchanged else None


def describe(trace: Mapping[str, Any]) -> str:
    """A clause about a timeline for messages, with the semicolon before it; empty where nothing was exchanged."""
    fraction = hidden_fraction(trace["otherData"]["processes"])
    return "" if fraction is None else f"; {fraction:.0%} of the exchange was hidden behind backward"


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for started, ended in sorted(intervals):
        if joined and started <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(ended, joined[-1][1])
        else:
            joined.append((started, ended))
    return joined
