"""Codec "auto": a strategy measures the link in its first steps and then takes the codec that should be fastest."""

from __future__ import annotations

from psengine.codecs.blocks import checked_flag
from psengine.codecs.identity import Identity


class Auto(Identity):
    """Values as they are, until the strategy has chosen another codec.

    Args:
        lossy: whether a codec that is not exact may be chosen. Without it the log only says what would be faster.
    """

    name = "auto"

    def __init__(self, *, lossy: bool = False) -> None:
        self.may_be_lossy = checked_flag(self.name, "lossy", lossy)
