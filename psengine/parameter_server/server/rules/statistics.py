"""What a job's rules count, for status pages and metrics."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

# Larger values are counted together under this one.
LARGEST_BUCKET = 64
# Of one worker: some steps of a model of a hundred chunks, more of a small one.
RECENT_PUSHES = 256


@dataclass
class JobStatistics:
    """Counters of one job at one shard, since the server started."""

    applied: int = 0  # pushes that changed weights, or were part of an average
    averaged: int = 0  # exchanges of chunks that ended in an average
    duplicates: int = 0  # repeats that were recognised and not applied again
    abstained: int = 0  # exchanges a worker took part in without a gradient
    non_finite: int = 0  # contributions with NaN or infinity that an average passed on, as native DDP does
    # Payload of the job's messages, readers' included, but not what measures the server.
    bytes_in: int = 0
    bytes_out: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # pushes refused, by reason
    # Number of pushes by how many updates old they were, up to ``LARGEST_BUCKET``.
    staleness: Counter[int] = field(default_factory=Counter)
    staleness_sum: int = 0  # the exact values, added up
    max_staleness: int = 0
    # By worker, of its last ``RECENT_PUSHES`` pushes.
    recent_staleness: dict[int, deque[int]] = field(default_factory=dict)

    def count_staleness(self, staleness: int, rank: int) -> None:
        """A push of worker ``rank`` was computed from weights ``staleness`` updates ago."""
        self.recent_staleness.setdefault(rank, deque(maxlen=RECENT_PUSHES)).append(staleness)
        self.staleness[min(staleness, LARGEST_BUCKET)] += 1
        self.staleness_sum += staleness
        self.max_staleness = max(self.max_staleness, staleness)

    def staleness_of(self, rank: int) -> dict[int, int]:
        """A worker's recent pushes, counted by how many updates old they were."""
        return dict(Counter(self.recent_staleness.get(rank, ())))

    def to_status(self) -> dict[str, Any]:
        """All but the recent ones, copied."""
        status = {name: count for name, count in vars(self).items() if name != "recent_staleness"}
        return {**status, "refused": dict(self.refused), "staleness": dict(self.staleness)}
