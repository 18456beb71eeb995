"""RESULTS.md and the README's table of figures: text made of the records, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness.figures import Spread, duration
from harness.goals import table_of_goals
from harness.machine import sentence
from harness.ranks import BENCHMARKS
from harness.record import Record
from harness.tables import Table

BEGIN, END = "<!-- figures of benchmarks/RESULTS.md: begin -->", "<!-- figures of benchmarks/RESULTS.md: end -->"
HEAD = """# Results

Written by `make bench`; do not edit. Each section has its command, machine, load and caveats. Times are medians over
rounds, with the 10th and 90th percentile; a ratio is the median of the ratios within a round. "Added to plain" is what
a candidate adds to the step that exchanges nothing; a ratio of two such times is the ratio of their medians. On a
machine that is not calm, compare ratios only.
"""


def read_records(folder: Path) -> dict[str, Record]:
    """Name -> record, in the order of their names."""
    return {path.stem: Record.from_json(path.read_text()) for path in sorted(folder.glob("*.json"))}


def write(out: Path, names: list[str]) -> None:
    """Write RESULTS.md into ``out``, of the records in its folder ``results``: those named first, in that order."""
    records = read_records(out / "results")
    ordered = {name: records[name] for name in [*names, *records] if name in records}
    (out / "RESULTS.md").write_text(results_of(ordered, out))
    if out == BENCHMARKS:
        readme = BENCHMARKS.parent / "README.md"
        readme.write_text(with_figures(readme.read_text(), ordered))


def results_of(records: Mapping[str, Record], out: Path) -> str:
    parts = [HEAD, "## Goals\n", table_of_goals(records).markdown() + "\n", "## The README's figures\n"]
    parts.append(figures_of(records).markdown() + "\n")
    for name, record in records.items():
        parts += [f"## {name}: {record.question}\n", f"{record.date}. `{record.command}`\n"]
        if record.failed:
            parts.append(f"**No figures: {record.failed}**\n")
            continue
        parts.append(sentence(record.machine, record.load) + "\n")
        parts += [f"- {caveat}" for caveat in record.caveats]
        if record.caveats:
            parts.append("")
        parts += [table.markdown() + "\n" for table in record.all_tables()]
        if (out / "results" / f"{name}.png").exists():
            parts.append(f"![{name}](results/{name}.png)\n")
    return "\n".join(parts)


def with_figures(readme: str, records: Mapping[str, Record]) -> str:
    """The README with its block of figures made anew.

    Raises:
        ValueError: it has no such block.
    """
    if BEGIN not in readme or END not in readme:
        raise ValueError(f"README.md has no block of figures (expected the lines {BEGIN} and {END})")
    before, _, rest = readme.partition(BEGIN)
    return f"{before}{BEGIN}\n{figures_of(records).markdown()}\n{END}{rest.partition(END)[2]}"


# ---- the README's figures --------------------------------------------------------------------------------------------

Figures = tuple[str, str]  # psengine's, the peers'


def figures_of(records: Mapping[str, Record]) -> Table:
    """What the README says, each row with the section of RESULTS.md that it is of."""
    echoes = {"echo": "a bare ZeroMQ echo", "working echo": "an echo that does the same work", "ps-lite": "ps-lite"}
    sums = {"gloo": "gloo", "MPICH": "MPICH"}
    wanted: list[tuple[str, str, Callable[[Record], Figures | None]]] = [
        ("time that data parallelism adds to a step, MLP of 10 M parameters, 2 ranks", "step_overhead", _added("mlp")),
        ("the same, GPT of 9 M parameters", "step_overhead", _added("gpt")),
        ("the same, ResNet-18", "step_overhead", _added("cnn")),
        ("sum of 25 MB over 2 ranks", "all_reduce", _times("psengine in place", sums, ranks=2, size="25 MB")),
        ("samples/s, one worker of four 4x slower; computing time is emulated", "straggler", _rates),
        ("25 MB to a server and back, 1 worker", "server_throughput", _times("async", echoes, workers=1, size="25 MB")),
    ]
    rows = []
    for text, name, figure in wanted:
        record = records.get(name)
        ours, peers = (None if record is None else figure(record)) or ("not measured", "")
        rows.append([text, ours, peers, f"`make bench BENCH={name}`"])
    return Table("", ["measurement", "psengine", "peer, in the same run", "command"], rows)


def _added(model: str) -> Callable[[Record], Figures | None]:
    def of(record: Record) -> Figures | None:
        case = record.find({"model": model, "ranks": 2})
        added = case and [case.overhead(name, record.baseline) for name in ("psengine", "native")]
        if not added or None in added:
            return None
        ours, native = (duration(spread.median) for spread in added)
        return ours, f"native DDP {native}"

    return of


def _times(ours: str, peers: Mapping[str, str], **labels: Any) -> Callable[[Record], Figures | None]:
    def of(record: Record) -> Figures | None:
        case = record.find(labels)
        if case is None or ours not in case.seconds:
            return None
        medians = {name: duration(Spread.of(seconds).median) for name, seconds in case.seconds.items()}
        return medians[ours], ", ".join(f"{text} {medians[name]}" for name, text in peers.items() if name in medians)

    return of


def _rates(record: Record) -> Figures | None:
    """The last settings of each candidate: the advised ones."""
    rates = {run["candidate"]: f"{run['samples_per_s']:.0f}" for run in record.values.get("runs", ())}
    if not {"async", "native"} <= set(rates):
        return None
    return f"`async` {rates['async']}", f"native DDP {rates['native']}"
