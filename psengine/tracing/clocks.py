"""Measures the offset of this host's clock from rank 0's, and the error of that.

CLOCK_MONOTONIC counts from each host's start. Ranks exchange their times a few times; an answer cannot come before its
question, which bounds the difference from both sides, whatever the network does in between::

    rank 0   s0 ────┐      ┌─ s0'          s0 happened before e, so   offset >= s0  - e
    rank r      s ──┴─ e ──┴─ s' ─ e'      s happened before s0', so  offset <= s0' - s
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The best round counts, and few have nobody interrupted.
ROUNDS = 8


@dataclass(frozen=True)
class Offset:
    """What to add to this host's clock to get rank 0's, within ``error_ns`` either way."""

    offset_ns: int
    error_ns: int


def estimate_offset(sent_ns: Sequence[int], received_ns: Sequence[int], reference_sent_ns: Sequence[int]) -> Offset:
    """Bound the difference of two clocks from ``ROUNDS`` exchanges in which everybody hears everybody's time.

    Args:
        sent_ns: this clock, as this rank entered each exchange.
        received_ns: this clock, when each exchange was over.
        reference_sent_ns: rank 0's clock, as it entered each exchange.
    """
    at_least = max(reference - received for reference, received in zip(reference_sent_ns, received_ns, strict=True))
    # Rank 0 enters an exchange after it heard what was sent in the one before.
    at_most = min(reference - sent for reference, sent in zip(reference_sent_ns[1:], sent_ns[:-1], strict=True))
    return Offset((at_least + at_most) // 2, (at_most - at_least + 1) // 2)
