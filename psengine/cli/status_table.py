"""Jobs, workers and shards as tables, for ``psengine status`` and ``psengine top``; they fit 60 columns and more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from psengine.cli.console import printable
from psengine.cli.server_status import Overview, ServerReport, shard_bytes
from psengine.parameter_server.server.core.telemetry import NOT_FINITE

# Where a step's time goes: part, colour, and a glyph that tells them apart without colour, or in ASCII.
PARTS = (("compute", "green", "█", "#"), ("wait", "yellow", "░", "."), ("wire", "blue", "▒", "-"),
         ("apply", "magenta", "▓", "+"))  # fmt: skip
BAR_WIDTH = 13
SPARKS, ASCII_SPARKS = "▁▂▃▄▅▆▇█", "_.:-=+*#"
STATE_STYLES = {"live": "green", "joining": "cyan", "silent": "bold red"}
UNKNOWN = "-"

Worker = Mapping[str, Any]


@dataclass(frozen=True)
class _Column:
    """A column of the workers' table; of those that do not fit, the least wanted go first."""

    title: str
    width: int
    rank: int
    cell: Callable[[Worker, bool], RenderableType]
    is_text: bool = False


def _plain(name: str) -> Callable[[Worker, bool], str]:
    return lambda worker, ascii_only: _number(worker.get(name))


_COLUMNS = (
    _Column("rank", 4, 0, _plain("rank")),
    _Column("state", 7, 1, lambda w, _: Text(_word(w.get("state")), STATE_STYLES.get(w.get("state", ""), "")), True),
    _Column("host", 14, 9, lambda w, _: Text(_host(w)), True),
    _Column("step", 7, 2, _plain("step")),
    _Column("lag", 4, 3, _plain("lag")),
    _Column("stale", 6, 6, lambda w, _: _pair(w.get("staleness_p50"), w.get("staleness_p99"))),
    _Column("heard", 6, 4, lambda w, _: _seconds(w.get("silent_s"))),
    _Column("steps/s", 7, 7, lambda w, _: _number(w.get("steps_per_s"))),
    _Column("samples/s", 9, 12, lambda w, _: _number(w.get("samples_per_s"))),
    _Column("loss", 8, 8, lambda w, _: _number(w.get("loss"))),
    _Column("ms/step", 7, 10, lambda w, _: _number(None if w.get("step_s") is None else w["step_s"] * 1e3)),
    _Column("a step's time", BAR_WIDTH, 5, lambda w, ascii_only: time_bar(w, ascii_only), True),
    _Column("pushes", 8, 13, _plain("pushes")),
    _Column("refused", 7, 11, _plain("refused")),
    _Column("late", 5, 14, _plain("late")),
    _Column("waits for", 9, 15, lambda w, _: ",".join(map(str, w.get("waiting_for") or ())) or UNKNOWN, True),
)


def jobs_view(overview: Overview, width: int, ascii_only: bool = False) -> RenderableType:
    """Every job: what it is, its counters, its workers."""
    parts: list[RenderableType] = []
    for name, job in overview.jobs.items():
        parts += [_headline(name, job), _counters(job, ascii_only), workers_table(job, width, ascii_only)]
        parts += [*_departed(job, overview.unix_s), Text()]
    if not overview.jobs and any(not report.error for report in overview.reports):
        text = "no job yet: it begins when its first worker comes"
        if not overview.is_complete:
            text = "which jobs there are is not known: not every shard answers"
        parts = [Text(text, style="dim"), Text()]
    elif overview.jobs and any(w.get("step_s") is not None for j in overview.jobs.values() for w in j["workers"]):
        parts.append(_legend(ascii_only))
    return Group(*parts)


def workers_table(job: Mapping[str, Any], width: int, ascii_only: bool = False) -> RenderableType:
    """A row for each worker, with as many columns as fit."""
    workers = job.get("workers") or []
    if not workers:
        return Text("  no workers now", style="dim")
    columns = _fitting(width)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", show_edge=False)
    for column in columns:
        table.add_column(
            column.title,
            justify="left" if column.is_text else "right",
            min_width=min(column.width, len(column.title)),
            max_width=column.width,
            no_wrap=True,
            overflow="ellipsis",
        )
    for worker in workers:
        style = "red" if worker.get("state") == "silent" else ""
        table.add_row(*(column.cell(worker, ascii_only) for column in columns), style=style)
    return table


def servers_table(
    reports: Sequence[ServerReport], rates: Mapping[Any, tuple[float, float]] | None = None
) -> RenderableType:
    """A row for each shard; with ``rates`` (by address and index: bytes in and out a second) those, else totals."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", show_edge=False)
    table.add_column("server", no_wrap=True, overflow="ellipsis", min_width=16)
    table.add_column("shard", justify="right")
    table.add_column("memory", justify="right", no_wrap=True)
    for title in ("MB/s in", "MB/s out") if rates is not None else ("MB in", "MB out"):
        table.add_column(title, justify="right", no_wrap=True)
    for report in reports:
        if report.error:
            table.add_row(Text(report.address, "bold red"), "", Text("does not answer", "bold red"), "", "")
        for shard in report.mute:
            table.add_row(
                _server_name(report) if shard is report.mute[0] else "",
                Text(_word(shard.get("index"))),
                Text("does not answer", "bold red"),
                "",
                "",
            )
        for position, shard in enumerate(report.shards, start=len(report.mute)):
            key = (report.address, shard.get("index"))
            moved = shard_bytes(shard) if rates is None else rates.get(key)
            cells = [UNKNOWN, UNKNOWN] if moved is None else [_number(amount / 1e6) for amount in moved]
            memory = f"{_megabytes(shard.get('memory_bytes'))} / {_megabytes(shard.get('max_memory_bytes'))}"
            table.add_row(
                _server_name(report) if position == 0 else "", Text(str(shard.get("index", position))), memory, *cells
            )
    return table


def events_view(events: Iterable[Mapping[str, Any]], most: int) -> RenderableType:
    """The last few, one a line."""
    lines = []
    for event in list(events)[-most:]:
        clock = time.strftime("%H:%M:%S", time.localtime(event.get("unix_s", 0.0)))
        style = "red" if event.get("kind") in ("evicted", "snapshot_failed", "gone", "memory") else ""
        job = f"{event['job']}  " if event.get("job") else ""
        text = printable(str(event.get("text", "")))
        lines.append(Text.assemble((f"{clock}  {job}", "dim"), (text, style), no_wrap=True, overflow="ellipsis"))
    return Group(*lines)


def time_bar(worker: Worker, ascii_only: bool = False, width: int = BAR_WIDTH) -> Text:
    """A worker's step, cut into its parts in proportion."""
    times = [max(0.0, worker.get(f"{name}_s") or 0.0) for name, *_ in PARTS]
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


def sparkline(counts: Mapping[str, int], ascii_only: bool = False, most: int = 24) -> str:
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


def _headline(name: str, job: Mapping[str, Any]) -> Text:
    members, expected = job.get("members", len(job.get("workers") or ())), job.get("expected_workers")
    is_short = expected is not None and members < expected
    count = f"{members} of {expected} workers" if is_short else f"{members} worker{'s' if members != 1 else ''}"
    newest, oldest = job.get("version_max", 0), job.get("version_min", 0)
    version = f"version {newest}" if newest == oldest else f"versions {oldest} to {newest}"
    size = f"{_megabytes(job.get('values_bytes'))} in {job.get('chunks', 0)} chunks"
    style = "yellow" if is_short else ""
    rule = job.get("rule_text") or (job.get("rule") or {}).get("name", "")
    return Text.assemble(("job ", "dim"), (name, "bold"), f"  {rule}  ", (count, style), f"  {size}  {version}")


def _counters(job: Mapping[str, Any], ascii_only: bool) -> Text:
    text = Text(f"  applied {job.get('applied', 0)}", style="")
    if job.get("averaged"):
        text.append(f"  averaged {job['averaged']}")
    # Who abstained only asked for weights: nothing was refused.
    reasons = (job.get("refused") or {}).items()
    refused = {reason: count for reason, count in reasons if count and reason != "abstained"}
    if refused:
        listed = ", ".join(f"{count} {reason}" for reason, count in refused.items())
        text.append(f"  refused {sum(refused.values())} ({listed})", "yellow")
    for name in ("late", "duplicates", "non_finite", "evicted"):
        if job.get(name):
            text.append(f"  {name.replace('_', ' ')} {job[name]}", "yellow" if name != "duplicates" else "")
    bars = sparkline(job.get("staleness") or {}, ascii_only)
    if bars:
        text.append("  staleness 0")
        text.append(f"|{bars}|", "cyan")
        text.append(f"most {job.get('max_staleness', 0)}")
    return text


def _departed(job: Mapping[str, Any], unix_s: float) -> list[Text]:
    """Who is gone and has not come back, and why: the row that somebody misses in the table."""
    here = {worker["rank"] for worker in job.get("workers") or ()}
    gone = {entry["rank"]: entry for entry in job.get("departed") or () if entry["rank"] not in here}
    return [
        Text(
            f"  worker {rank} on {entry.get('host')} is gone: {entry.get('reason')} after step {entry.get('step')},"
            f" {_seconds(max(0.0, unix_s - entry.get('unix_s', 0.0)))} ago",
            "dim" if entry.get("reason") == "left" else "yellow",
        )
        for rank, entry in sorted(gone.items())
    ]


def _legend(ascii_only: bool) -> Text:
    text = Text("a step's time: ", style="dim")
    for name, style, glyph, ascii_glyph in PARTS:
        text.append(f"{ascii_glyph if ascii_only else glyph} ", style)
        text.append(f"{name}  ")
    return text


def _server_name(report: ServerReport) -> Text:
    text = Text(report.address)
    uptime_s = report.about("uptime_s")
    if uptime_s is not None:
        text.append(f" up {_seconds(uptime_s)}", "dim")
    if not report.healthy:
        text.append(" unhealthy", "bold red")
    return text


def _number(value: Any) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, int) or value == NOT_FINITE:
        return str(value)
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"


def _pair(one: Any, other: Any) -> str:
    return UNKNOWN if one is None and other is None else f"{_number(one)}/{_number(other)}"


def _word(value: Any) -> str:
    return UNKNOWN if value is None else str(value)


def _host(worker: Worker) -> str:
    return f"{_word(worker.get('host'))}:{worker['pid']}" if worker.get("pid") else _word(worker.get("host"))


def _seconds(value: Any) -> str:
    if value is None:
        return UNKNOWN
    if value < 10:
        return f"{value:.1f}s"
    if value < 120:
        return f"{value:.0f}s"
    return f"{value / 60:.0f}m" if value < 7200 else f"{value / 3600:.0f}h"


def _megabytes(value: Any) -> str:
    if value is None:
        return UNKNOWN
    return f"{value / 1e6:.3g} MB" if value < 1e9 else f"{value / 1e9:.3g} GB"
