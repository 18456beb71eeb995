"""A shard's status as the bytes of a STATUS_REPORT, which anybody may ask for as often as they like."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

# A shard with many workers and chunks needs milliseconds: whoever asks all the time takes a tenth of its time at most.
COSTLY_S = 0.001
KEPT_FACTOR = 10.0


class StatusReport:
    """One shard's; a costly one is told again until ``KEPT_FACTOR`` times what it took to make have passed.

    Args:
        describe: makes it, JSON-able.
        clock_s: measures how long that took, and how long ago it was.
    """

    def __init__(self, describe: Callable[[], dict[str, Any]], clock_s: Callable[[], float]) -> None:
        self._describe = describe
        self._clock_s = clock_s
        self._kept: torch.Tensor | None = None
        self._kept_until_s = 0.0

    def payload(self) -> torch.Tensor:
        """The text in UTF-8, as uint8; not to be written to."""
        began_s = self._clock_s()
        if self._kept is not None and began_s < self._kept_until_s:
            return self._kept
        self._kept = torch.frombuffer(bytearray(json.dumps(self._describe()).encode()), dtype=torch.uint8)
        ended_s = self._clock_s()
        cost_s = ended_s - began_s
        self._kept_until_s = ended_s + (KEPT_FACTOR * cost_s if cost_s > COSTLY_S else 0.0)
        return self._kept
