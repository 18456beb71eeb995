"""From the events of all processes of a training to what came of it. Pure."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# After a fault, until the next one and for so long at most, the longest time without a step is its stall.
WINDOW_S = 20.0
# By when a coordinator that was killed has started again and heard the others.
COORDINATOR_S = 5.0
SILENCES = frozenset({"worker stopped", "link cut"})
DEATHS = frozenset({"worker killed", "host left"})
KINDS = ("a kill", "silence", "coordinator dead too")


@dataclass(frozen=True)
class FaultRecord:
    """A fault that came about: when, to which host, and until when it lasted."""

    at_s: float
    cause: str
    host: str
    until_s: float


@dataclass
class Process:
    """Of a worker: when it began, met the others or waited for a place, and computed its first batch."""

    host: str
    began_s: float
    ready_s: float = math.inf
    worked_s: float = math.inf


@dataclass
class Training:
    """A training that has ended.

    Attributes:
        weights: their digests, as the processes that reached the end have them.
        steps: by number, when the first worker had ended it.
        numbers: by step, the largest number that a worker wrote down with it.
        batches: by step, the samples of each batch that somebody computed; a batch that was computed twice is there
            once.
        processes: of all workers.
    """

    weights: set[str] = field(default_factory=set)
    steps: dict[int, float] = field(default_factory=dict)
    numbers: dict[int, float] = field(default_factory=dict)
    batches: dict[int, set[tuple[int, ...]]] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)

    @classmethod
    def read(cls, directory: Path) -> Training:
        found = cls()
        for path in directory.glob("*.events"):
            lines = path.read_text().splitlines()
            events = [json.loads(line) for line in lines if line.endswith("]")]
            found.take(path.name.rsplit("-", 2)[0], events)
        return found

    def take(self, host: str, events: Iterable[Sequence[Any]]) -> None:
        """The events of one process."""
        process = Process(host, 0.0)
        self.processes.append(process)
        for at_s, kind, *rest in events:
            if kind == "begin":
                process.began_s = at_s
            elif kind == "ready":
                process.ready_s = at_s
            elif kind == "batch":
                self.batches.setdefault(rest[0], set()).add(tuple(rest[1]))
                process.worked_s = min(process.worked_s, at_s)
            elif kind == "step":
                self.steps[rest[0]] = min(at_s, self.steps.get(rest[0], at_s))
                self.numbers[rest[0]] = max([self.numbers.get(rest[0], 0.0), *rest[1:]])
            elif kind == "end":
                self.weights.add(rest[0])

    @property
    def seconds(self) -> float:
        """From the end of the first step to that of the last."""
        return max(self.steps.values()) - min(self.steps.values())

    @property
    def steps_per_s(self) -> float:
        return (len(self.steps) - 1) / self.seconds

    def samples_once(self, samples: int, epochs: int) -> int:
        """How many of ``epochs`` times ``samples`` were taken in exactly one batch of their epoch."""
        steps = max(self.batches)
        counts: Counter[tuple[int, int]] = Counter()
        for step, batches in self.batches.items():
            epoch = (step - 1) * epochs // steps
            counts.update((epoch, index) for batch in batches for index in batch)
        return sum(counts[epoch, index] == 1 for epoch in range(epochs) for index in range(samples))

    def gap(self, at_s: float, until_s: float) -> tuple[float, float]:
        """The longest time between two steps' ends, of those that ended after ``at_s`` and began before ``until_s``."""
        ends = sorted(self.steps.values())
        gaps = [(begin, end) for begin, end in itertools.pairwise(ends) if end > at_s and begin < until_s]
        return max(gaps, key=lambda gap: gap[1] - gap[0], default=(at_s, at_s))

    def stalls(self, faults: Sequence[FaultRecord]) -> dict[str, list[float]]:
        """By kind, how much longer than usual no step ended after the faults that took a worker away."""
        ends = sorted(self.steps.values())
        usual_s = statistics.median(end - begin for begin, end in itertools.pairwise(ends))
        found: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for fault in faults:
            if fault.cause not in SILENCES | DEATHS or not self._took_part(fault):
                continue
            next_s = min((other.at_s for other in faults if other.at_s > fault.at_s), default=math.inf)
            begin_s, end_s = self.gap(fault.at_s, min(next_s, fault.at_s + WINDOW_S))
            meanwhile = {
                other.cause
                for other in faults
                if other.at_s <= end_s
                and other.until_s + COORDINATOR_S * (other.cause == "coordinator killed") >= fault.at_s
            }
            kind = KINDS[2] if "coordinator killed" in meanwhile else KINDS[1] if meanwhile & SILENCES else KINDS[0]
            found[kind].append(max(0.0, end_s - begin_s - usual_s))
        return found

    def next_contributions(self, faults: Sequence[FaultRecord]) -> tuple[list[float], list[float]]:
        """After kills of workers: how long until a spare had a batch; and until the next process of the host had one,
        where it lived so long.
        """
        spares, successors = [], []
        for fault in faults:
            if fault.cause != "worker killed" or not self._took_part(fault):
                continue
            waiting = [one.worked_s for one in self.processes if one.ready_s < fault.at_s < one.worked_s < math.inf]
            later = [one for one in self.processes if one.host == fault.host and one.began_s > fault.at_s]
            spares += [min(waiting) - fault.at_s] if waiting else []
            next_s = min(later, key=lambda one: one.began_s).worked_s if later else math.inf
            successors += [next_s - fault.at_s] if next_s < math.inf else []
        return spares, successors

    def _took_part(self, fault: FaultRecord) -> bool:
        """Whether the host's process had computed a batch when the fault came."""
        before = [one for one in self.processes if one.host == fault.host and one.began_s < fault.at_s]
        return bool(before) and max(before, key=lambda one: one.began_s).worked_s < fault.at_s


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value that so many of ``values`` do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]
