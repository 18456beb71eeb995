"""A shard's status as the bytes of a STATUS_REPORT, which anybody may ask for as often as they like."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from psengine.parameter_server.status_model import ShardStatus, to_json

# A shard with many workers and chunks needs milliseconds for a report: asking all the time takes a tenth of its time.
COSTLY_S = 0.001
KEPT_FACTOR = 10.0


class StatusReport:
    """Makes and keeps reports: one that was costly to make is sent again for ``KEPT_FACTOR`` times that long.

    Args:
        describe: the shard's status.
        clock_s: measures how long making it took, and how old it is.
    """

    def __init__(self, describe: Callable[[], ShardStatus], clock_s: Callable[[], float]) -> None:
        self._describe = describe
        self._clock_s = clock_s
        self._kept: torch.Tensor | None = None
        self._kept_until_s = 0.0

    def payload(self) -> torch.Tensor:
        """The text in UTF-8, as uint8; not to be written to."""
        began_s = self._clock_s()
        if self._kept is not None and began_s < self._kept_until_s:
            return self._kept
        self._kept = torch.frombuffer(bytearray(json.dumps(to_json(self._describe())).encode()), dtype=torch.uint8)
        ended_s = self._clock_s()
        cost_s = ended_s - began_s
        self._kept_until_s = ended_s + (KEPT_FACTOR * cost_s if cost_s > COSTLY_S else 0.0)
        return self._kept
