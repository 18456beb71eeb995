"""From a timeline: how long each rank computed and waited in each step. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from psengine.errors import ConfigurationError

# A step in which every rank took so many times its median contains something else, such as an evaluation.
_UNUSUAL = 4.0
_WAITING = ("wait", "collective")


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Measured steps, the same ones for all ranks.

    Attributes:
        compute_s: for each rank, what it took from one forward to the next less what it waited, for each step.
        waited_s: for each rank, how long it waited for others and for the exchange, for each step.
        samples: for each rank, samples in a step (mean); 1 where the model did not say.
        hosts: for each rank.
        has_samples: whether ``samples`` were counted.
        exchanged_bytes: gradients that a rank exchanges in a step; 0 where the timeline does not say.
    """

    compute_s: tuple[tuple[float, ...], ...]
    waited_s: tuple[tuple[float, ...], ...]
    samples: tuple[float, ...]
    hosts: tuple[str, ...]
    has_samples: bool
    exchanged_bytes: int = 0

    @property
    def world_size(self) -> int:
        """How many ranks were measured."""
        return len(self.compute_s)

    @property
    def steps(self) -> int:
        """How many steps were measured."""
        return len(self.compute_s[0])

    @property
    def exchange_s(self) -> float:
        """What the exchange itself takes: in each step the rank that waits least comes last, and waits for nobody."""
        return float(statistics.median(min(column) for column in zip(*self.waited_s, strict=True)))

    @property
    def measured_rate(self) -> float:
        """Samples per second of all ranks together, as they were measured."""
        total_s = max(sum(own) + sum(waits) for own, waits in zip(self.compute_s, self.waited_s, strict=True))
        return sum(self.samples) * self.steps / total_s


def step_times(trace: Mapping[str, Any], *, warm_up: int = 5, fewest: int = 8) -> StepTimes:
    """Read the steps of a merged timeline of strategy "sync".

    Args:
        trace: as ``timeline_files.merge`` makes it.
        warm_up: leave out so many steps at the beginning (buckets are laid out anew, caches are cold).
        fewest: steps to be left then.

    Raises:
        ConfigurationError: the script made too few steps, trained with another strategy, or its spans have the host's
            times and the model was on a GPU.
    """
    device = trace["otherData"].get("device") or "cpu"
    if device != "cpu" and not trace["otherData"].get("is_synchronized", False):
        raise ConfigurationError(
            f"the timeline does not show which rank is slow (expected waits of the device {device}, got the host's, and"
            " the host runs ahead). Fix: let PSENGINE_TIMELINE_SYNCHRONIZE=1, which advise sets, reach every rank"
        )
    begins: dict[int, dict[int, float]] = defaultdict(dict)
    waits: dict[tuple[int, int], float] = defaultdict(float)
    samples: dict[tuple[int, int], float] = defaultdict(float)
    # (rank, step) → bucket → bytes.
    buckets: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for event in trace["traceEvents"]:
        if event["ph"] != "X":
            continue
        rank, step = at = event["pid"], event["args"]["step"]
        if "bucket" in event["args"] and "bytes" in event["args"]:
            # A bucket that is packed in parts has several spans; the last ones hold all of it.
            bucket = event["args"]["bucket"]
            buckets[at][bucket] = max(buckets[at].get(bucket, 0), event["args"]["bytes"])
        if event["name"] == "forward":
            # A model with several forwards in a step begins it with the first.
            begins[rank].setdefault(step, event["ts"] / 1e6)
            samples[at] += event["args"].get("samples") or 0
        elif event["cat"] in _WAITING:
            waits[at] += event["dur"] / 1e6
        elif event["name"] in ("push", "apply"):
            raise ConfigurationError(
                "advise measures strategy 'sync', and this script chose one over servers by itself (expected spans of a"
                f" collective, got {event['name']!r}). Fix: leave the script's strategy to PSENGINE_STRATEGY"
            )
    ranks = sorted(begins)
    if not ranks:
        raise ConfigurationError(
            "the timeline has no steps (expected forwards of a model wrapped by psengine, got none)"
        )
    common = set.intersection(*({step for step in begins[rank] if step + 1 in begins[rank]} for rank in ranks))
    steps = [step for step in sorted(common) if step - min(common) >= warm_up]
    if len(steps) < fewest:
        raise ConfigurationError(
            f"too few steps to judge (expected {warm_up + fewest} or more on every rank, got {len(common)};"
            f" the first {warm_up} are left out as warm-up). Fix: let the script train longer"
        )
    period = {at: begins[at[0]][at[1] + 1] - begins[at[0]][at[1]] for at in itertools.product(ranks, steps)}
    waited = {at: min(period_s, waits[at]) for at, period_s in period.items()}
    medians = {rank: statistics.median(period[rank, step] - waited[rank, step] for step in steps) for rank in ranks}
    usual = [
        step
        for step in steps
        if any(period[rank, step] - waited[rank, step] <= _UNUSUAL * medians[rank] for rank in ranks)
    ]
    hosts = {int(process["rank"]): str(process.get("host", "")) for process in trace["otherData"]["processes"]}
    has_samples = all(samples[at] > 0 for at in period)
    return StepTimes(
        compute_s=tuple(tuple(period[rank, step] - waited[rank, step] for step in usual) for rank in ranks),
        waited_s=tuple(tuple(waited[rank, step] for step in usual) for rank in ranks),
        samples=tuple(
            statistics.fmean(samples[rank, step] for step in usual) if has_samples else 1.0 for rank in ranks
        ),
        hosts=tuple(hosts.get(rank, "") for rank in ranks),
        has_samples=has_samples,
        exchanged_bytes=int(statistics.median_high(sum(b.values()) for b in buckets.values())) if buckets else 0,
    )
