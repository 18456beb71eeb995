"""What a replica's tensors count in an average, as packing applies it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """By what a replica's tensors are divided while they are packed, so that the sum over replicas is their average.

    Attributes:
        divisor: divides every element. 1 where the exchange divides, or nobody does.
        is_nothing: zeros travel in the place of the tensors, whatever these are. A factor could not do that: no factor
            makes a zero of NaN.
    """

    divisor: float = 1.0
    is_nothing: bool = False


WHOLE = Share()
NOTHING = Share(is_nothing=True)
