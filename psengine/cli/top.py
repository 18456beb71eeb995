"""The live view of ``psengine top``: one thread asks each server, the main thread draws what is known.

asker a   ask ─ note ─ interval ─ ask ...        report, rates, "went away", "is back"
asker b   ask ─────── (timeout) ─ note ...                    │
main      draw 4 times a second ◄─────────────────────────────┘
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.text import Text

from psengine.cli.keyboard import listening
from psengine.cli.status_overview import Overview, ServerReport, merge, shard_bytes
from psengine.cli.status_sources import Source, ask
from psengine.cli.status_table import events_view, jobs_view, servers_table
from psengine.parameter_server.status_model import Event

FRAMES_PER_S = 4
MAX_EVENTS = 200
# Lines of the screen for events; the tables have the rest.
EVENT_LINES = 8
CLOSING_S = 2.0

Rates = dict[Any, tuple[float, float]]


class Watch:
    """Polls servers, each from a thread of its own, so that a server that is away does not delay the others.

    Args:
        sources: the servers.
        interval_s: between an answer and the next question.
        job: show this one alone; None shows all.
    """

    def __init__(self, sources: Sequence[Source], interval_s: float, job: str | None = None) -> None:
        self._sources = sources
        self._interval_s = interval_s
        self._job = job
        self._lock = threading.Condition()
        self._reports: dict[str, ServerReport] = {}
        self._rates: Rates = {}
        self._answers: dict[str, int] = dict.fromkeys((source.address for source in sources), 0)
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=[source], name="psengine-top", daemon=True) for source in sources
        ]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopping.set()
        deadline_s = time.monotonic() + CLOSING_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def wait_for(self, polls: int, timeout_s: float) -> bool:
        """Wait until every server was asked so often; whether that was in time."""
        with self._lock:
            return self._lock.wait_for(lambda: self.polls >= polls, timeout_s)

    @property
    def polls(self) -> int:
        """How often every server was asked, whether it answered or not."""
        return min(self._answers.values())

    def look(self) -> View:
        """The current view."""
        with self._lock:
            reports = [
                self._reports.get(source.address, ServerReport(address=source.address, error="not asked yet"))
                for source in self._sources
            ]
            overview = merge(reports, self._job)
            events = sorted([*overview.events, *self._events], key=lambda event: event.unix_s)
            return View(overview, dict(self._rates), events, self._job)

    def _run(self, source: Source) -> None:
        try:
            while not self._stopping.is_set():
                report = ask(source)
                with self._lock:
                    self._note(report)
                    self._answers[source.address] += 1
                    self._lock.notify_all()
                self._stopping.wait(self._interval_s)
        finally:
            source.close()

    def _note(self, report: ServerReport) -> None:
        """Compare with the last report: rates, and whether the server went away or came back."""
        before = self._reports.get(report.address)
        self._reports[report.address] = report
        # An old rate would look like traffic.
        self._rates = {key: rate for key, rate in self._rates.items() if key[0] != report.address}
        if report.error and (before is None or not before.error):
            self._say("gone", f"{report.address} does not answer: {report.error}")
        elif before is None:
            return
        elif before.error and not report.error:
            self._say("back", f"{report.address} answers again")
        elif not report.error:
            # An epoch is 0 where no shard answered.
            if 0 != before.status.epoch != report.status.epoch != 0:
                self._say("restarted", f"{report.address} was restarted")
            self._rates.update(_rates(before, report))

    def _say(self, kind: str, text: str) -> None:
        self._events.append(Event(time.time(), kind, "", None, text))


@dataclass(frozen=True)
class View:
    """One frame; rich draws it as wide as the terminal is at that moment."""

    overview: Overview
    rates: Rates
    events: Sequence[Event]
    job: str | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Header, servers, jobs, events."""
        reports, jobs = self.overview.reports, self.overview.jobs
        away = sum(bool(report.error) for report in reports)
        answering = f"{len(reports) - away} of {len(reports)} server{'s' if len(reports) != 1 else ''} answering"
        yield Text.assemble(
            ("psengine top", "bold"),
            f"  {time.strftime('%H:%M:%S')}  ",
            (answering, "bold red" if away else "green"),
            f"  {len(jobs)} job{'s' if len(jobs) != 1 else ''}",
            ("   q quits" if options.is_terminal else "", "dim"),
        )
        for problem in self.overview.problems:
            yield Text(problem, "red")
        yield Text()
        yield servers_table(reports, options.max_width, self.rates)
        yield Text()
        if self.job is not None and not jobs and self.overview.is_complete:
            yield Text(f"no job {self.job!r} yet", "dim")
        else:
            yield jobs_view(self.overview, options.max_width, options.ascii_only)
        if self.events:
            yield Text("events", "dim")
            yield events_view(self.events, EVENT_LINES)


def show_live(watch: Watch, console: Console, iterations: int | None) -> None:
    """Draw until somebody presses q or Ctrl-C, or every server was asked ``iterations`` times."""
    screen = Live(watch.look(), console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
    with listening() as keyboard, screen as live:
        while iterations is None or watch.polls < iterations:
            if "q" in keyboard.pressed().lower():
                return
            watch.wait_for(watch.polls + 1, 1 / FRAMES_PER_S)
            live.update(watch.look(), refresh=True)


def show_frames(watch: Watch, console: Console, iterations: int, timeout_s: float) -> Overview:
    """Print one frame each time that every server was asked, one below the other; the last one's overview."""
    for count in range(1, iterations + 1):
        watch.wait_for(count, timeout_s)
        view = watch.look()
        console.print(Group(view, Text()))
    return view.overview


def _rates(before: ServerReport, now: ServerReport) -> Rates:
    """Bytes in and out a second of each shard that is the same process as before."""
    passed_s = now.answered_s - before.answered_s
    earlier = {(shard.epoch, shard.index): shard_bytes(shard) for shard in before.status.answering}
    rates: Rates = {}
    for shard in now.status.answering:
        then = earlier.get((shard.epoch, shard.index))
        if then is not None and passed_s > 0:
            # A job that ended takes its counts with it.
            moved = (max(0.0, (new - old) / passed_s) for old, new in zip(then, shard_bytes(shard), strict=True))
            rates[now.address, shard.index] = (next(moved), next(moved))
    return rates
