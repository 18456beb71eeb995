"""Jobs, workers and shards as tables, for ``psengine status`` and ``psengine top``; they fit 60 columns and more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from psengine.cli.status_overview import Overview, ServerReport, shard_bytes
from psengine.parameter_server.status_model import Counts, Event, JobStatus, WorkerStatus

# The parts of a step's time: name, colour, and the glyphs that tell them apart without colour and in ASCII.
PARTS = (("compute", "green", "█", "#"), ("wait", "yellow", "░", "."), ("wire", "blue", "▒", "-"),
         ("apply", "magenta", "▓", "+"))  # fmt: skip
BAR_WIDTH = 13
# Narrower, the servers' table has no columns of traffic.
TRAFFIC_WIDTH = 80
SPARKS, ASCII_SPARKS = "▁▂▃▄▅▆▇█", "_.:-=+*#"
STATE_STYLES = {"live": "green", "joining": "cyan", "silent": "bold red"}
ALARMING_EVENTS = {"evicted", "snapshot_failed", "gone", "memory", "log_low", "log_full", "log_failed"}
UNKNOWN = "-"


@dataclass(frozen=True)
class _Column:
    """A column of the workers' table; where not all fit, columns of a high rank are left out first."""

    title: str
    width: int
    rank: int
    cell: Callable[[WorkerStatus, bool], RenderableType]
    is_text: bool = False


def _plain(name: str) -> Callable[[WorkerStatus, bool], str]:
    return lambda worker, ascii_only: _number(getattr(worker, name))


_COLUMNS = (
    _Column("rank", 4, 0, _plain("rank")),
    _Column("state", 7, 1, lambda w, _: Text(w.state, STATE_STYLES[w.state]), True),
    _Column("host", 14, 9, lambda w, _: Text(f"{w.host}:{w.pid}" if w.pid else w.host), True),
    _Column("step", 7, 2, _plain("step")),
    _Column("lag", 4, 3, _plain("lag")),
    _Column("stale", 6, 6, lambda w, _: _pair(w.staleness_p50, w.staleness_p99)),
    _Column("heard", 6, 4, lambda w, _: _seconds(w.silent_s)),
    _Column("steps/s", 7, 7, _plain("steps_per_s")),
    _Column("samples/s", 9, 12, _plain("samples_per_s")),
    _Column("loss", 8, 8, _plain("loss")),
    _Column("ms/step", 7, 10, lambda w, _: _number(None if w.step_s is None else w.step_s * 1e3)),
    _Column("a step's time", BAR_WIDTH, 5, lambda w, ascii_only: time_bar(w, ascii_only), True),
    _Column("pushes", 8, 13, _plain("pushes")),
    _Column("refused", 7, 11, _plain("refused")),
    _Column("late", 5, 14, _plain("late")),
    _Column("waits for", 9, 15, lambda w, _: ",".join(map(str, w.waiting_for)) or UNKNOWN, True),
)


def jobs_view(overview: Overview, width: int, ascii_only: bool = False) -> RenderableType:
    """Every job: what it is, its counters, its workers."""
    parts: list[RenderableType] = []
    for name, job in overview.jobs.items():
        parts += [_headline(name, job), _counters(job, ascii_only), workers_table(job, width, ascii_only)]
        parts += [*_departed(job, overview.unix_s), Text()]
    if not overview.jobs and any(not report.error for report in overview.reports):
        text = "no job to show: a job begins when its first worker comes"
        if not overview.is_complete:
            text = "which jobs there are is not known: not every shard answers"
        parts = [Text(text, style="dim"), Text()]
    elif any(worker.step_s is not None for job in overview.jobs.values() for worker in job.workers):
        parts.append(_legend(ascii_only))
    return Group(*parts)


def workers_table(job: JobStatus, width: int, ascii_only: bool = False) -> RenderableType:
    """A row for each worker, with as many columns as fit."""
    if not job.workers:
        return Text("  no workers now", style="dim")
    columns = _fitting(width)
    table = _table()
    for column in columns:
        table.add_column(
            column.title,
            justify="left" if column.is_text else "right",
            min_width=min(column.width, len(column.title)),
            max_width=column.width,
            no_wrap=True,
            overflow="ellipsis",
        )
    for worker in job.workers:
        style = "red" if worker.state == "silent" else ""
        table.add_row(*(column.cell(worker, ascii_only) for column in columns), style=style)
    return table


def servers_table(
    reports: Sequence[ServerReport], width: int, rates: Mapping[Any, tuple[float, float]] | None = None
) -> RenderableType:
    """A row for each shard; with ``rates`` (by address and index: bytes in and out a second) those, else totals."""
    table = _table()
    table.add_column("server", overflow="fold")
    table.add_column("shard", justify="right", no_wrap=True)
    table.add_column("durability", no_wrap=True)
    traffic = ("MB in", "MB out") if rates is None else ("MB/s in", "MB/s out")
    for title in ("memory", *(traffic if width >= TRAFFIC_WIDTH else ())):
        table.add_column(title, justify="right", no_wrap=True)
    for report in reports:
        if report.error:
            table.add_row(Text(report.address, "bold red"), "", "", Text("does not answer", "bold red"))
        rows: list[tuple[RenderableType, ...]] = [
            (str(shard.index), "", Text("does not answer", "bold red")) for shard in report.status.mute
        ]
        for shard in report.status.answering:
            moved = shard_bytes(shard) if rates is None else rates.get((report.address, shard.index))
            cells = [UNKNOWN, UNKNOWN] if moved is None else [_number(amount / 1e6) for amount in moved]
            memory = f"{_megabytes(shard.memory_bytes)} / {_megabytes(shard.max_memory_bytes)}"
            tier = shard.durability or UNKNOWN
            style = "yellow" if tier == "memory" else ""
            rows.append((str(shard.index), Text(tier, style), memory, *cells))
        for position, row in enumerate(rows):
            name = _server_name(report) if position == 0 else ""
            table.add_row(name, *row[: len(table.columns) - 1])
    return table


def events_view(events: Iterable[Event], max_lines: int) -> RenderableType:
    """The last few, one a line."""
    lines = []
    for event in list(events)[-max_lines:]:
        clock = time.strftime("%H:%M:%S", time.localtime(event.unix_s))
        style = "red" if event.kind in ALARMING_EVENTS else ""
        job = f"{event.job}  " if event.job else ""
        lines.append(Text.assemble((f"{clock}  {job}", "dim"), (event.text, style), no_wrap=True, overflow="ellipsis"))
    return Group(*lines)


def time_bar(worker: WorkerStatus, ascii_only: bool = False, width: int = BAR_WIDTH) -> Text:
    """A worker's step, cut into its parts in proportion."""
    times = [max(0.0, getattr(worker, f"{name}_s") or 0.0) for name, *_ in PARTS]
    total = sum(times)
    if total <= 0:
        return Text(UNKNOWN, "dim")
    bar, done, ends = Text(), 0, 0.0
    for (_, style, glyph, ascii_glyph), seconds in zip(PARTS, times, strict=True):
        ends += seconds
        cells = round(ends / total * width) - done
        bar.append((ascii_glyph if ascii_only else glyph) * cells, style)
        done += cells
    return bar


def sparkline(counts: Counts, ascii_only: bool = False, most: int = 24) -> str:
    """How often each value occurred, from 0 on; the highest bar is the most frequent."""
    by_value = {int(value): count for value, count in counts.items() if count}
    if not by_value:
        return ""
    glyphs = ASCII_SPARKS if ascii_only else SPARKS
    values = [by_value.get(value, 0) for value in range(min(max(by_value), most - 1) + 1)]
    rest = sum(count for value, count in by_value.items() if value >= most)
    if rest:
        values[-1] += rest
    top = max(values)
    return "".join(" " if not count else glyphs[max(0, -(-count * len(glyphs) // top) - 1)] for count in values)


def _fitting(width: int) -> list[_Column]:
    chosen: list[_Column] = []
    left = width
    for column in sorted(_COLUMNS, key=lambda column: column.rank):
        if column.width + 2 > left:
            break
        chosen.append(column)
        left -= column.width + 2
    return [column for column in _COLUMNS if column in chosen]


def _headline(name: str, job: JobStatus) -> Text:
    is_short = job.members < job.expected_workers
    count = f"{job.members} worker{'s' if job.members != 1 else ''}"
    if is_short:
        count = f"{job.members} of {job.expected_workers} workers"
    version = f"version {job.version_max}"
    if job.version_min != job.version_max:
        version = f"versions {job.version_min} to {job.version_max}"
    size = f"{_megabytes(job.values_bytes)} in {job.chunks} chunks"
    style = "yellow" if is_short else ""
    return Text.assemble(
        ("job ", "dim"), (name, "bold"), f"  {job.rule_text}  ", (count, style), f"  {size}  {version}"
    )


def _counters(job: JobStatus, ascii_only: bool) -> Text:
    text = Text(f"  applied {job.applied}", style="")
    if job.averaged:
        text.append(f"  averaged {job.averaged}")
    # A worker that abstained only asked for weights: nothing was refused.
    refused = {reason: count for reason, count in job.refused.items() if count and reason != "abstained"}
    if refused:
        listed = ", ".join(f"{count} {reason}" for reason, count in refused.items())
        text.append(f"  refused {sum(refused.values())} ({listed})", "yellow")
    for name in ("late", "duplicates", "non_finite", "evicted"):
        if getattr(job, name):
            style = "yellow" if name != "duplicates" else ""
            text.append(f"  {name.replace('_', ' ')} {getattr(job, name)}", style)
    bars = sparkline(job.staleness, ascii_only)
    if bars:
        text.append("  staleness 0")
        text.append(f"|{bars}|", "cyan")
        text.append(f"most {job.max_staleness}")
    return text


def _departed(job: JobStatus, unix_s: float) -> list[Text]:
    """The workers that left and did not come back, and why."""
    here = {worker.rank for worker in job.workers}
    gone = {one.rank: one for one in job.departed if one.rank not in here}
    return [
        Text(
            f"  worker {rank} on {one.host} is gone: {one.reason} after step {one.step},"
            f" {_seconds(max(0.0, unix_s - one.unix_s))} ago",
            "dim" if one.reason == "left" else "yellow",
        )
        for rank, one in sorted(gone.items())
    ]


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", show_edge=False)


def _legend(ascii_only: bool) -> Text:
    text = Text("a step's time: ", style="dim")
    for name, style, glyph, ascii_glyph in PARTS:
        text.append(f"{ascii_glyph if ascii_only else glyph} ", style)
        text.append(f"{name}  ")
    return text


def _server_name(report: ServerReport) -> Text:
    text = Text(report.address)
    if report.status.uptime_s is not None:
        text.append(f" up {_seconds(report.status.uptime_s)}", "dim")
    if not report.healthy:
        text.append(" unhealthy", "bold red")
    return text


def _number(value: float | str | None) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, int | str):
        return str(value)
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e8 else f"{value:.4g}"


def _pair(one: int | None, other: int | None) -> str:
    return UNKNOWN if one is None and other is None else f"{_number(one)}/{_number(other)}"


def _seconds(value: float) -> str:
    if value < 10:
        return f"{value:.1f}s"
    if value < 120:
        return f"{value:.0f}s"
    return f"{value / 60:.0f}m" if value < 7200 else f"{value / 3600:.0f}h"


def _megabytes(value: float) -> str:
    return f"{value / 1e6:.3g} MB" if value < 1e9 else f"{value / 1e9:.3g} GB"
