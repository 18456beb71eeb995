"""The outcome of an exchange for one replica's contribution."""

from __future__ import annotations

from enum import Enum


class ExchangeOutcome(Enum):
    """How an exchange ended for one replica's contribution."""

    AVERAGED = "averaged"  # it is part of the average
    APPLIED = "applied"  # servers stepped with it
    LATE = "late"  # the others went on without it
    REFUSED = "refused"  # servers did not step with it: not finite, or computed from weights of long ago
    FENCED = "fenced"  # its sender had lost its place, and takes part anew

    @property
    def counts(self) -> bool:
        """Whether the contribution changed anything."""
        return self in (ExchangeOutcome.AVERAGED, ExchangeOutcome.APPLIED)
