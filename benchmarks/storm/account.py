"""From the events of all processes of a training to what came of it. Pure."""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# After a fault, for so long at most, the longest time without a step is its stall.
WINDOW_S = 20.0


@dataclass
class Training:
    """A training that has ended.

    Attributes:
        weights: their digests, as the processes that reached the end have them.
        steps: by number, when the first worker had ended it.
        numbers: by step, the largest number that a worker wrote down with it.
        batches: by step, the samples of each batch that somebody computed; a batch that was computed twice is there
            once.
        begins: by host, when processes began; and when each computed its first batch.
    """

    weights: set[str] = field(default_factory=set)
    steps: dict[int, float] = field(default_factory=dict)
    numbers: dict[int, float] = field(default_factory=dict)
    batches: dict[int, set[tuple[int, ...]]] = field(default_factory=dict)
    begins: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

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
        began_s, has_worked = 0.0, False
        for at_s, kind, *rest in events:
            if kind == "begin":
                began_s = at_s
            elif kind == "batch":
                self.batches.setdefault(rest[0], set()).add(tuple(rest[1]))
                if not has_worked:
                    has_worked = True
                    self.begins.setdefault(host, []).append((began_s, at_s))
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

    def stall_s(self, at_s: float) -> float:
        """How much longer than usual no step ended, at or after a fault."""
        ends = sorted(self.steps.values())
        gaps = list(itertools.pairwise(ends))
        usual_s = statistics.median(end - begin for begin, end in gaps)
        later = [end - begin for begin, end in gaps if end > at_s and begin < at_s + WINDOW_S]
        return max(0.0, max(later, default=usual_s) - usual_s)

    def next_contribution_s(self, host: str, at_s: float) -> float | None:
        """How long after a kill the next process of ``host`` had a batch; None where none had."""
        later = [worked_s - at_s for began_s, worked_s in self.begins.get(host, ()) if began_s > at_s]
        return min(later, default=None)


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value that so many of ``values`` do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]
