"""What came of a storm beside a calm day and an oracle, as a line and as rows of tables."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from account import KINDS, FaultRecord, Training, percentile
from faults import SHARES
from harness.tables import Table


@dataclass(frozen=True)
class Result:
    """Of a seed.

    Attributes:
        found: the training through the storm; without steps where it has not ended.
        calm: the undisturbed one.
        oracle: native DDP's, with a rank for each virtual worker.
        faults: those that came about.
        samples: in an epoch.
    """

    seed: int
    found: Training
    calm: Training
    oracle: Training
    faults: Sequence[FaultRecord]
    samples: int
    epochs: int

    @property
    def has_ended(self) -> bool:
        return bool(self.found.weights)

    @property
    def is_equal(self) -> bool:
        return len(self.found.weights) == 1 and self.found.weights == self.calm.weights == self.oracle.weights

    @property
    def once(self) -> int:
        return self.found.samples_once(self.samples, self.epochs) if self.has_ended else 0

    @property
    def is_true(self) -> bool:
        """Whether weights are equal and each sample counted once."""
        return self.is_equal and self.once == self.samples * self.epochs

    @property
    def goodput(self) -> float:
        return self.found.steps_per_s / self.calm.steps_per_s

    def stalls(self) -> dict[str, list[float]]:
        return self.found.stalls(self.faults) if self.has_ended else {kind: [] for kind in KINDS}

    def line(self) -> str:
        if not self.has_ended:
            return "has not ended"
        together = [stall for some in self.stalls().values() for stall in some]
        return (
            f"weights sha256 {_said(self.found)} {self._compared(self.calm, 'undisturbed')}"
            f" {self._compared(self.oracle, 'native DDP with 8 ranks')};"
            f" samples once: {self.once:,} of {self.samples * self.epochs:,}; faults {len(self.faults)};"
            f" goodput {self.goodput:.0%}; stall {_median_and_p99(together)}"
        )

    def _compared(self, other: Training, name: str) -> str:
        return f"= {name}" if self.found.weights == other.weights else f"but {_said(other)} of {name}"

    def row(self) -> list[str]:
        counts = Counter(fault.cause for fault in self.faults)
        if not self.has_ended:
            return [str(self.seed), "has not ended", *["-"] * (len(SHARES) + len(KINDS) + 2)]
        return [
            str(self.seed),
            "yes" if self.is_equal else "NO",
            "all" if self.once == self.samples * self.epochs else f"{self.once:,}",
            *(str(counts[cause]) for cause in SHARES),
            f"{self.goodput:.0%}",
            *(" / ".join(spread(stalls, digits=2)[:2]) for stalls in self.stalls().values()),
        ]


def tables(results: Sequence[Result]) -> list[Table]:
    """A row for each seed; and of all together, stalls by kind and when the next contribution came."""
    stalled = [f"stall by {kind}, median / p99" for kind in KINDS]
    seeds = Table(
        "",
        ["seed", "equal", "samples once", *SHARES, "goodput", *stalled],
        [result.row() for result in results],
    )
    ended = [result for result in results if result.has_ended]
    stalls = [(f"stall by {kind}", [stall for one in ended for stall in one.stalls()[kind]]) for kind in KINDS]
    contributions = [one.found.next_contributions(one.faults) for one in ended]
    found = [
        *stalls,
        ("next contribution, of a spare", [time_s for spares, _ in contributions for time_s in spares]),
        ("next contribution, of the next process", [time_s for _, later in contributions for time_s in later]),
    ]
    rows = [[name, len(values), *spread(values, digits=2)] for name, values in found]
    return [seeds, Table("All seeds", ["", "times", "median", "p99", "longest"], rows)]


def spread(values: Sequence[float], *, digits: int) -> list[str]:
    """Median, p99 and longest, in seconds."""
    if not values:
        return ["-", "-", "-"]
    figures = (statistics.median(values), percentile(values, 0.99), max(values))
    return [f"{value:.{digits}f} s" for value in figures]


def _median_and_p99(values: Sequence[float]) -> str:
    median, p99, _ = spread(values, digits=1)
    return f"median {median}, p99 {p99}"


def _said(training: Training) -> str:
    return " and ".join(sorted(f"{one[:8]}..." for one in training.weights)) or "none"
