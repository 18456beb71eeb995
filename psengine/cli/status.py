"""``psengine status``: workers, their progress, and the servers' load; once, or again and again."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from psengine.cli.console import open_console, printable
from psengine.errors import ConfigurationError, PSEngineError
from psengine.parameter_server.client.addresses import keys_from_environment, parse_addresses
from psengine.protocol.keys import CurveClientKeys
from psengine.status_port.overview import merge_jobs, owns_weights, percentile
from psengine.status_port.status_model import Event, JobStatus, ServerFacts, ShardStatus, WorkerStatus

if TYPE_CHECKING:
    from psengine.parameter_server.client.worker_session import WorkerSession

EXIT_UNHEALTHY = 1
EVENT_LINES = 5
EPILOG = (
    "Examples: [bold]psengine status --server-address tcp://a:7077,tcp://b:7077[/bold] · [bold]psengine status"
    " --watch[/bold] · [bold]psengine status --json | jq .jobs.default.workers[/bold]"
)

ServerAddress = Annotated[
    str | None,
    typer.Option(
        "--server-address",
        metavar="ADDRESSES",
        help="tcp://host:port or ipc://path of servers, with commas; by default PSENGINE_SERVERS.",
    ),
]
TimeoutS = Annotated[float, typer.Option("--timeout-s", help="Deadline of one answer.", min=0.1, max=600.0)]
# Narrower, the servers' table has no columns of traffic.
TRAFFIC_WIDTH = 80
STATE_STYLES = {"live": "green", "joining": "cyan", "silent": "bold red"}
ALARMING_EVENTS = {"evicted", "snapshot_failed", "memory", "log_low", "log_full", "log_failed"}
UNKNOWN = "-"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("status", epilog=EPILOG)(status)


def status(
    servers: ServerAddress = None,
    job: Annotated[str | None, typer.Option("--job", metavar="NAME", help="This job alone.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval-s", help="With --watch, seconds between two looks.", min=0.05, max=3600.0)
    ] = 1.0,
    timeout_s: TimeoutS = 5.0,
) -> None:
    """Show the state of servers and jobs: workers, steps, staleness, where the time goes, counters, events.

    Exit code 0: all is well; 130: Ctrl-C; 1: a server does not answer, a shard does not work, a worker is silent, a
    follower is not in sync, or there is no job of that name; 2: wrong arguments. CURVE keys come from
    PSENGINE_SERVER_KEY and PSENGINE_CLIENT_KEY.
    """
    if as_json and watch:
        raise typer.BadParameter("--json and --watch exclude each other", param_hint="status")
    # The client logs about servers that are away, which the status shows.
    logging.getLogger("psengine").addHandler(logging.NullHandler())
    sources = open_sources(servers, timeout_s)
    console = open_console()
    try:
        if watch:
            _watch(sources, job, interval_s, console)
            return
        found = ask_all(sources, job)
    finally:
        for source in sources:
            source.close()
    if as_json:
        print(msgspec.json.encode(found.to_json()).decode())
    else:
        console.print(found)
    if found.problems:
        raise typer.Exit(EXIT_UNHEALTHY)


def _watch(sources: Sequence[StatusSource], job: str | None, interval_s: float, console: Console) -> None:
    """Show the state until Ctrl-C: on a terminal's whole screen, elsewhere one below the other."""
    # SIGTERM raises an exception, which restores the terminal.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with Live(console=console, screen=console.is_terminal, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            found = ask_all(sources, job)
            if console.is_terminal:
                live.update(found, refresh=True)
            else:
                console.print(found)
            time.sleep(interval_s)


@dataclass(frozen=True)
class _Column:
    """A column of the workers' table."""

    title: str
    width: int
    cell: Callable[[WorkerStatus], RenderableType]
    is_text: bool = False


def _plain(name: str) -> Callable[[WorkerStatus], str]:
    return lambda worker: _number(getattr(worker, name))


def _ms(name: str) -> Callable[[WorkerStatus], str]:
    return lambda worker: UNKNOWN if (seconds := getattr(worker, name)) is None else _number(seconds * 1e3)


# The first ones that fit are shown.
_COLUMNS = (
    _Column("rank", 4, _plain("rank")),
    _Column("state", 7, lambda w: Text(w.state, STATE_STYLES[w.state]), True),
    _Column("step", 7, _plain("step")),
    _Column("lag", 4, _plain("lag")),
    _Column("heard", 6, lambda w: _seconds(w.silent_s)),
    _Column("ms/step", 7, _ms("step_s")),
    _Column("stale", 6, lambda w: _pair(w.staleness_p50, w.staleness_p99)),
    _Column("steps/s", 7, _plain("steps_per_s")),
    _Column("loss", 8, _plain("loss")),
    _Column("host", 14, lambda w: Text(f"{w.host}:{w.pid}" if w.pid else w.host), True),
    _Column("compute", 7, _ms("compute_s")),
    _Column("blocked", 7, _ms("blocked_s")),
    _Column("refused", 7, _plain("refused")),
    _Column("samples/s", 9, _plain("samples_per_s")),
    _Column("pushes", 8, _plain("pushes")),
    _Column("waits for", 9, lambda w: ",".join(map(str, w.waiting_for)) or UNKNOWN, True),
)


def jobs_view(overview: Overview, width: int) -> RenderableType:
    """Every job: what it is, its counters, its workers."""
    parts: list[RenderableType] = []
    for name, job in overview.jobs.items():
        parts += [_headline(name, job), _counters(job), workers_table(job, width)]
        parts += [*_departed(job, overview.unix_s), Text()]
    if not overview.jobs and any(not report.error for report in overview.reports):
        parts = [Text("no job to show: a job begins when its first worker comes", style="dim"), Text()]
    return Group(*parts)


def workers_table(job: JobStatus, width: int) -> RenderableType:
    """A row for each worker, with as many columns as fit."""
    if not job.workers:
        return Text("  no workers now", style="dim")
    ends = accumulate(column.width + 2 for column in _COLUMNS)
    columns = [column for column, end in zip(_COLUMNS, ends, strict=True) if end <= width]
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
        table.add_row(*(column.cell(worker) for column in columns), style=style)
    return table


def servers_table(reports: Sequence[ServerReport], width: int) -> RenderableType:
    """A row for each shard."""
    table = _table()
    table.add_column("server", overflow="fold")
    table.add_column("shard", justify="right", no_wrap=True)
    table.add_column("durability", no_wrap=True)
    for title in ("memory", *(("MB in", "MB out") if width >= TRAFFIC_WIDTH else ())):
        table.add_column(title, justify="right", no_wrap=True)
    for report in reports:
        if report.error:
            table.add_row(Text(report.address, "bold red"), "", "", Text("does not answer", "bold red"))
        for shard in report.shards:
            jobs = shard.jobs.values()  # payload bytes of all of them
            moved = [_number(sum(getattr(job, name) for job in jobs) / 1e6) for name in ("bytes_in", "bytes_out")]
            memory = f"{_megabytes(shard.memory_bytes)} / {_megabytes(shard.max_memory_bytes)}"
            name = _server_name(report) if shard is report.shards[0] else ""
            cells = (name, str(shard.index), report.facts.durability or UNKNOWN, memory, *moved)
            table.add_row(*cells[: len(table.columns)])
    return table


def events_view(events: Sequence[Event], most: int) -> RenderableType:
    """The last few, below each other."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for event in events[-most:]:
        clock = time.strftime("%H:%M:%S", time.localtime(event.unix_s))
        job = f"{event.job}  " if event.job else ""
        style = "red" if event.kind in ALARMING_EVENTS else ""
        table.add_row(clock, Text.assemble((job, "dim"), (event.text, style)))
    return table


def _headline(name: str, job: JobStatus) -> Text:
    is_short = job.members < job.expected_workers
    of = f" of {job.expected_workers}" if is_short else ""
    count = f"{job.members}{of} worker{'s' if job.members != 1 or is_short else ''}"
    since = "" if job.version_min == job.version_max else f"{job.version_min} to "
    version = f"version {since}{job.version_max}"
    size = f"{_megabytes(job.values_bytes)} in {job.chunks} chunks"
    style = "yellow" if is_short else ""
    return Text.assemble(
        ("job ", "dim"), (name, "bold"), f"  {job.rule_text}  ", (count, style), f"  {size}  {version}"
    )


def _counters(job: JobStatus) -> Text:
    text = Text(f"  applied {job.applied}", style="")
    if job.averaged:
        text.append(f"  averaged {job.averaged}")
    # A worker that abstained only asked for weights: nothing was refused.
    refused = {reason: count for reason, count in job.refused.items() if count and reason != "abstained"}
    if refused:
        listed = ", ".join(f"{count} {reason}" for reason, count in refused.items())
        text.append(f"  refused {sum(refused.values())} ({listed})", "yellow")
    for name in ("duplicates", "non_finite", "evicted"):
        if getattr(job, name):
            style = "yellow" if name != "duplicates" else ""
            text.append(f"  {name.replace('_', ' ')} {getattr(job, name)}", style)
    for name, rows in job.table_rows.items():
        text.append(f"  table {name} of {rows} rows, {_megabytes(job.table_bytes[name])}")
    if job.staleness:
        half, most = percentile(job.staleness, 0.5), job.max_staleness
        text.append(f"  staleness p50 {half}, p99 {percentile(job.staleness, 0.99)}, most {most}")
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


def _server_name(report: ServerReport) -> Text:
    text = Text(report.address)
    if report.facts.uptime_s is not None:
        text.append(f" up {_seconds(report.facts.uptime_s)}", "dim")
    if (replica := report.facts.replica) is not None:
        text.append(f" {replica.text}", "" if replica.is_in_sync else "red")
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


@dataclass(frozen=True, kw_only=True)
class ServerReport:
    """One server's answer: its shards; or an ``error`` that says why there is none."""

    address: str
    error: str = ""
    shards: tuple[ShardStatus, ...] = ()

    @property
    def facts(self) -> ServerFacts:
        """What the server says of itself."""
        return next((shard.server for shard in self.shards if shard.server is not None), ServerFacts())


class StatusSource:
    """A server, asked as workers ask it; works before any job exists, for every kind of job, and for a follower.

    Args:
        address: of its first shard.
        keys: CURVE keys, if it wants some.
        timeout_s: deadline of one answer.
    """

    def __init__(self, address: str, keys: CurveClientKeys | None, timeout_s: float) -> None:
        self.address = address
        self._keys = keys
        self._timeout_s = timeout_s
        self._session: WorkerSession | None = None

    def ask(self) -> ServerReport:
        """Its report; never raises for a server that is away. Keeps the connection for the next question."""
        try:
            shards = _printable(self.connected().status())
            report = ServerReport(
                address=self.address, shards=msgspec.convert(shards, tuple[ShardStatus, ...], str_keys=True)
            )
            merge_jobs(report.shards)
        except msgspec.ValidationError as error:
            text = f"{self.address} has a status that this psengine does not understand ({error}). Fix: install the"
            return ServerReport(address=self.address, error=f"{text} same version on both sides")
        except (PSEngineError, ValueError, LookupError, TypeError) as error:
            self.close()
            return ServerReport(address=self.address, error=printable(str(error)) or type(error).__name__)
        return report

    def connected(self) -> WorkerSession:
        """The connection; PSEngineError where the server does not answer, or does not let us in."""
        from psengine.parameter_server.client.worker_session import SessionOptions, WorkerSession

        if self._session is None:
            wait_s, addresses = self._timeout_s, [self.address]
            session = WorkerSession(
                SessionOptions(
                    addresses=addresses, timeout_s=wait_s, connect_timeout_s=wait_s, keys=self._keys, follows_lead=False
                )
            )
            session.start()
            self._session = session
        return self._session

    def close(self) -> None:
        """Drop the connection; the next question makes a new one."""
        session, self._session = self._session, None
        if session is not None:
            session.close()


@dataclass(frozen=True, kw_only=True)
class Overview:
    """All servers' reports, and the jobs merged over their shards: all, or the one of the name ``wanted``."""

    reports: Sequence[ServerReport]
    jobs: Mapping[str, JobStatus]
    wanted: str | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Servers, jobs, events; what is wrong; as wide as the terminal is at that moment."""
        yield servers_table(self.reports, options.max_width)
        yield Text()
        yield jobs_view(self, options.max_width)
        if self.events:
            yield Text("events", "dim")
            yield events_view(self.events, EVENT_LINES)
        for text in self.warnings:
            yield Text(text, "yellow")
        for text in self.problems:
            yield Text(text, "bold red")

    @property
    def unix_s(self) -> float:
        """Now, by the servers' clock, which dates events; by this machine's where no server tells."""
        stamps = [report.facts.unix_s for report in self.reports]
        return max((stamp for stamp in stamps if stamp is not None), default=time.time())

    @property
    def events(self) -> list[Event]:
        """The latest events, newest last."""
        return sorted((e for report in self.reports for e in report.facts.events), key=lambda event: event.unix_s)

    @property
    def problems(self) -> list[str]:
        """What is wrong, in words; empty where all is well."""
        found = []
        for report in self.reports:
            address, error = report.address, report.error
            if error:
                found.append(error if error.startswith(address) else f"{address}: {error}")
            elif not report.facts.healthy:
                found.append(f"{address} answers, but a shard of it does not work")
            replica = report.facts.replica
            if replica is not None and (not replica.is_in_sync or replica.why):
                missing = "no other server can take over" if replica.role == "leading" else "it copies its leader"
                found.append(f"{address}: {replica.text}: {replica.why or missing}")
            found += [
                f"{address}: no room for the log of shard {log.shard}: nothing is acknowledged until its disk has some"
                for log in report.facts.logs
                if log.is_full
            ]
        for name, job in self.jobs.items():
            if job.lost:
                found.append(job.lost)
            silent = [str(worker.rank) for worker in job.workers if worker.state == "silent"]
            if silent:
                found.append(f"job {name!r}: nothing was heard of worker {', '.join(silent)}")
        # A job may be at a server that does not answer.
        if self.wanted not in (None, *self.jobs) and not any(report.error for report in self.reports):
            found.append(f"there is no job {self.wanted!r} at these servers")
        return found

    @property
    def warnings(self) -> list[str]:
        """What may be meant so, in words."""
        found = []
        for report in self.reports:
            forgotten = {
                repr(name)
                for shard in report.shards
                for name, job in shard.jobs.items()
                if report.facts.durability == "memory" and owns_weights(job.rule)
            }
            if forgotten:
                text = f"has durability memory: when it ends, the model of job {', '.join(sorted(forgotten))} is lost"
                found.append(f"{report.address} {text} (--snapshot-dir)")
            if report.facts.is_draining:
                found.append(f"{report.address} drains: it lets no more workers in, and ends when the last has left")
        return found

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "healthy": not self.problems,
            "problems": self.problems,
            "warnings": self.warnings,
            "servers": [_server_json(report) for report in self.reports],
            "jobs": self.jobs,
            "events": self.events,
        }


def open_sources(servers: str | None, timeout_s: float) -> list[StatusSource]:
    """A source for each address of an argument, else of PSENGINE_SERVERS: followers too.

    Args:
        servers: addresses with commas.
        timeout_s: deadline of one answer.

    Raises:
        ConfigurationError: none is named, one is malformed, or CURVE keys are half given.
    """
    addresses = parse_addresses(servers)
    if not addresses:
        raise ConfigurationError(
            "no server is named (expected tcp://host:port; got none). Fix: --server-address tcp://127.0.0.1:7077, or"
            " set PSENGINE_SERVERS"
        )
    keys = keys_from_environment()
    return [StatusSource(address, keys, timeout_s) for address in dict.fromkeys("|".join(addresses).split("|"))]


def ask_all(sources: Sequence[StatusSource], job: str | None = None) -> Overview:
    """Ask all servers at once; with ``job`` about that job alone."""
    pool = ThreadPoolExecutor(max_workers=len(sources), thread_name_prefix="psengine-status")
    try:
        return merge(list(pool.map(StatusSource.ask, sources)), job)
    finally:
        pool.shutdown(wait=False)  # Ctrl-C waits for no answer


def merge(reports: Sequence[ServerReport], job: str | None = None) -> Overview:
    """One overview; with ``job`` of that job alone. A shard that several addresses lead to counts once."""
    # An epoch is the random number of a server process's life.
    shards = {(shard.epoch, shard.index): shard for report in reports for shard in report.shards}
    jobs = merge_jobs(shards.values())
    chosen = {name: jobs[name] for name in jobs if job is None or name == job}
    return Overview(reports=reports, jobs=chosen, wanted=job)


def _server_json(report: ServerReport) -> dict[str, Any]:
    own = {name: value for name, value in vars(report.facts).items() if name != "events"}
    shards = [
        {name: value for name, value in vars(shard).items() if name not in ("jobs", "server")}
        for shard in report.shards
    ]
    return {"address": report.address, "error": report.error or None, **own, "shards": shards}


def _printable(value: Any) -> Any:
    """A status whose texts have the characters spelled out that a terminal would obey."""
    if isinstance(value, dict):
        return {printable(name): _printable(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return printable(value) if isinstance(value, str) else value
