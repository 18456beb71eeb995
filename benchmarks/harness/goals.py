"""What psengine wants to reach, and whether a record shows that it did. Never asserted by a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.figures import Case, Spread, duration, number
from harness.record import Record
from harness.tables import Table


@dataclass(frozen=True)
class Goal:
    """A bound on a figure of a case.

    Attributes:
        question: for the table.
        record: the record's name.
        labels: the case's.
        ours: the candidate.
        bound: what ``measure`` may be at most (at least, for a speed).
        peer: the other candidate, if ``measure`` needs one.
        measure: "time": ours ÷ the peer's, within a round; "least": the same of the least times; "added": of what each
            adds to the record's baseline; "speed": the peer's time ÷ ours; "seconds": ours; "beyond": ours minus the
            peer's, in seconds.
    """

    question: str
    record: str
    labels: Mapping[str, Any]
    ours: str
    bound: float
    peer: str = ""
    measure: str = "time"

    def figure(self, case: Case, baseline: str | None) -> Spread | None:
        """None where the case lacks a candidate."""
        if not {self.ours, self.peer} - {""} <= set(case.seconds):
            return None
        ours, peers = case.seconds[self.ours], case.seconds.get(self.peer, ())
        if self.measure == "seconds":
            return Spread.of(ours)
        if self.measure == "beyond":
            return Spread.of(own - other for own, other in zip(ours, peers, strict=True))
        if self.measure == "least":
            return Spread.of([min(ours) / min(peers)])
        if self.measure == "added":
            own, other = case.overhead(self.ours, baseline), case.overhead(self.peer, baseline)
            return None if own is None or other is None else Spread.of([own.median / other.median])
        return case.ratios(*((self.peer, self.ours) if self.measure == "speed" else (self.ours, self.peer)))

    def wanted(self) -> str:
        bound = duration(self.bound) if self.measure in ("seconds", "beyond") else f"{self.bound:g}"
        words = {
            "time": f"time ≤ {bound} of {self.peer}'s",
            "least": f"least time ≤ {bound} of {self.peer}'s",
            "added": f"adds ≤ {bound} of what {self.peer} adds",
            "speed": f"≥ {bound} of {self.peer}'s speed",
            "seconds": f"≤ {bound}",
            "beyond": f"≤ {bound} beyond {self.peer}",
        }
        return words[self.measure]

    def row(self, records: Mapping[str, Record]) -> list[str]:
        """Question, goal, what was measured, whether it is reached."""
        record = records.get(self.record)
        case = None if record is None else record.find(self.labels)
        figure = None if record is None or case is None else self.figure(case, record.baseline)
        if figure is None:
            return [self.question, self.ours, self.wanted(), "not measured", "unknown"]
        reached = figure.median >= self.bound if self.measure == "speed" else figure.median <= self.bound
        if self.measure in ("seconds", "beyond"):
            text = figure.time_text()
        else:
            text = number(figure.median) if self.measure in ("least", "added") else figure.text()
        return [self.question, self.ours, self.wanted(), text, "reached" if reached else "NOT reached"]


@dataclass(frozen=True)
class Group:
    """Goals that differ in the case alone."""

    question: str
    record: str
    cases: Mapping[str, Mapping[str, Any]]
    goals: list[tuple[Any, ...]] = field(default_factory=list)

    def goals_of(self) -> list[Goal]:
        return [
            Goal(f"{self.question}, {name}", self.record, labels, *rest)
            for name, labels in self.cases.items()
            for rest in self.goals
        ]


def _steps(models: str, ranks: tuple[int, ...], **more: Any) -> dict[str, dict[str, Any]]:
    return {
        f"{model}, {count} rank{'s' * (count > 1)}": {"model": model, "ranks": count, **more}
        for model in models.split()
        for count in ranks
    }


def _pushes(sizes_mb: tuple[int, ...], workers: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    return {
        f"{size} MB, {count} worker{'s' * (count > 1)}": {"size": f"{size} MB", "workers": count}
        for size in sizes_mb
        for count in workers
    }


def _sums(*sizes: str) -> dict[str, dict[str, Any]]:
    return {f"{size}, 2 ranks": {"size": size, "ranks": 2} for size in sizes}


def _hosts(models: str, layout: str) -> dict[str, dict[str, Any]]:
    return {
        f"{model}, {layout} ranks": {"model": model, "hosts x ranks": layout, "link": "1gbit"}
        for model in models.split()
    }


STEP, SERVERS, SHARDED = "step_overhead", "step_overhead_servers", "step_overhead_sharded"
PUSH, SUM, START, CLUSTER = "server_throughput", "all_reduce", "start_up", "cluster"
GROUPS = [
    Group(
        "a step",
        STEP,
        _steps("mlp gpt cnn", (1, 2)),
        [("psengine", 1, "native"), ("psengine-gloo", 1, "native")],
    ),
    Group("a step, 400 parameters", STEP, _steps("small", (1,)), [("psengine", 0.5, "native", "added")]),
    Group("a step, 400 parameters", STEP, _steps("small", (1,)), [("psengine-views", 0.5, "native-views", "added")]),
    Group("a step, 400 parameters", STEP, _steps("small", (2,)), [("psengine-views", 1, "psengine")]),
    Group("a step and its optimizer", SERVERS, _steps("mlp", (2,)), [("sync-server", 1, "native", "added")]),
    Group("a step and its optimizer", SERVERS, _steps("mlp", (2,)), [("async", 0.5, "native", "added")]),
    Group("a step and AdamW", SHARDED, _steps("mlp", (2,), optimizer="AdamW"), [("sharded", 1, "plain")]),
    Group("a step and momentum", SHARDED, _steps("mlp", (2,), optimizer="momentum"), [("sharded", 1, "plain")]),
    Group("a sum", SUM, _sums("4 KB", "64 KB"), [("psengine in place", 1, "MPICH")]),
    Group("a sum", SUM, _sums("4 KB", "64 KB"), [("psengine in place", 1, "MPICH", "least")]),
    Group("a sum", SUM, _sums("25 MB"), [("psengine in place", 1, peer) for peer in ("gloo", "MPICH")]),
    Group("push and pull", PUSH, _pushes((25,), (1,)), [("async", 0.007, "", "seconds")]),
    Group("push and pull", PUSH, _pushes((25,), (1,)), [("async, packed in the segment", 0.005, "", "seconds")]),
    Group("push and pull", PUSH, _pushes((25,), (2,)), [("async", 0.010, "", "seconds")]),
    Group("push and pull", PUSH, _pushes((25, 100), (1, 2)), [("async", 3, "ps-lite", "speed")]),
    Group("push and pull", PUSH, _pushes((25, 100), (1, 2)), [("async", 2, "echo", "speed")]),
    Group("push and pull", PUSH, _pushes((25, 100), (1, 2)), [("async, TCP only", 0.9, "working echo", "speed")]),
    Group(
        "a step on hosts at 1 Gbit/s",
        CLUSTER,
        _hosts("gpt", "4 x 1"),
        [
            ("sync", 1, "native"),
            ("sync-server", 1.05, "native"),
            ("sync:compress=bf16", 0.67, "native"),
            ("sync:compress=int8", 0.55, "native"),
            ("sync:compress=topk,ratio=0.01", 1.3, "none"),
            ("sync:compress=onebit", 1.3, "none"),
            ("local:every=16", 1.2, "none"),
            ("local:every=16,compress=bf16", 1.1, "none"),
        ],
    ),
    Group("a step on hosts at 1 Gbit/s", CLUSTER, _hosts("gpt", "2 x 2"), [("hierarchical", 0.8, "native")]),
    Group("a step on hosts at 1 Gbit/s", CLUSTER, _hosts("mlp", "2 x 2"), [("hierarchical", 0.75, "native")]),
    Group(
        "a step at 10 Mbit/s and 20 ms",
        "cluster_far",
        {"gpt, 2 x 1 ranks": {"model": "gpt", "hosts x ranks": "2 x 1", "link": "10mbit"}},
        [("diloco:every=100,compress=fp4", 100, "native", "speed")],
    ),
    Group("start", START, {"import": {"what": "import"}}, [("psengine", 0.1, "torch", "beyond")]),
    Group("start", START, {"help": {"what": "help"}}, [("psengine", 0.3, "", "seconds")]),
    Group("start", START, {"first step": {"what": "first step"}}, [("psengine run", 1, "torchrun", "beyond")]),
    Group(
        "pack, scale, cast on a GPU",
        "fusion_cuda",
        {f"100 MB in {n}": {"pass": "pack", "MB": 100, "tensors": str(n), "clock": "device"} for n in (1, 50, 400)},
        [("psengine", 0.85, "device copy", "speed")],
    ),
    Group(
        "a step on a GPU",
        "fusion_cuda",
        {
            name: {"model": model, "clock": "device"}
            for name, model in (
                ("CNN", "ResNet-50, batch 16"),
                ("GPT", "GPT, 12 blocks of width 768, batch 4 x 256"),
            )
        },
        [("psengine", 1, "native")],
    ),
]


def table_of_goals(records: Mapping[str, Record]) -> Table:
    rows = [goal.row(records) for group in GROUPS for goal in group.goals_of()]
    reached = sum(row[-1] == "reached" for row in rows)
    unknown = sum(row[-1] == "unknown" for row in rows)
    title = f"{reached} of {len(rows)} goals reached, {unknown} not measured"
    return Table(title, ["question", "candidate", "goal", "measured (10th-90th)", ""], rows)
