"""What the status was: rings of samples in memory, so that charts need no database.

    History (a thread) ── once a second ──► status ──┬─► Track: 600 samples, 1 s apart      the last ten minutes
                                                     └─► Track: 1440 samples, 60 s apart    the last day

Counters become rates per second between two samples of a track. NaN stands for what is not known.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import threading
import time
from array import array
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from psengine.parameter_server.status_model import JobStatus, ServerStatus

logger = logging.getLogger(__name__)

_dumps = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode

LENGTHS = {1: 600, 60: 1440}
# What is kept of each kind of row.
FIELDS = {
    "shard": ("bytes_in_per_s", "bytes_out_per_s"),
    "job": ("applied_per_s", "refused_per_s", "staleness_mean"),
    "worker": ("step", "loss", "steps_per_s"),
}
# Bounds memory: workers cost 24 bytes a sample, 12.5 MB in all with both tracks full.
MAX_ROWS = {"shard": 256, "job": 64, "worker": 256}


class _Row:
    """The series of one shard, job or worker.

    Attributes:
        series: by field, as long as the track.
        seen: number of the newest sample that it was part of.
    """

    __slots__ = ("_counted_s", "_counts", "seen", "series")

    def __init__(self, fields: tuple[str, ...], length: int) -> None:
        self.series = {field: array("d", [math.nan]) * length for field in fields}
        self.seen = -1
        self._counts: Mapping[str, float] = {}
        self._counted_s = -math.inf

    def rates(self, counts: Mapping[str, float], now_s: float) -> dict[str, float]:
        """Per second since the last call; NaN at the first, and where a counter began anew."""
        elapsed_s = now_s - self._counted_s
        found = {}
        for name, count in counts.items():
            before = self._counts.get(name, math.inf)
            is_known = count >= before and 0.0 < elapsed_s < math.inf
            found[name] = (count - before) / elapsed_s if is_known else math.nan
        self._counts, self._counted_s = counts, now_s
        return found


class _Rows:
    """The rows of one kind, those seen last at the end; a row that was missing for a whole track is forgotten.

    Where there is no room for a new row, it replaces the row that has been missing the longest, if any is missing.
    """

    def __init__(self, kind: str, max_rows: int, length: int) -> None:
        self._fields, self._max_rows, self._length = FIELDS[kind], max_rows, length
        self.rows: dict[Any, _Row] = {}

    def begin(self, number: int) -> None:
        """Sample ``number`` begins: nothing is known of any row."""
        self.rows = {key: row for key, row in self.rows.items() if number - row.seen < self._length}
        for row in self.rows.values():
            for series in row.series.values():
                series[number % self._length] = math.nan

    def row(self, key: Any, number: int) -> _Row | None:
        """The row of ``key``, which is part of sample ``number``; None where there is no room."""
        row = self.rows.pop(key, None)
        if row is None:
            if len(self.rows) >= self._max_rows:
                longest_missing = next(iter(self.rows))
                if self.rows[longest_missing].seen >= number - 1:
                    return None
                del self.rows[longest_missing]
            row = _Row(self._fields, self._length)
        self.rows[key] = row
        row.seen = number
        return row


class Track:
    """Samples at one distance; not thread-safe.

    Args:
        interval_s: distance of samples.
        length: how many are kept.
        max_rows: how many shards, jobs and workers of all jobs are followed.
    """

    def __init__(self, interval_s: int, length: int, max_rows: Mapping[str, int] = MAX_ROWS) -> None:
        self.interval_s = interval_s
        self._length = length
        self._unix_s = array("d", [math.nan]) * length
        self._count = 0
        self._rows = {kind: _Rows(kind, max_rows[kind], length) for kind in FIELDS}

    def record(self, status: ServerStatus, now_s: float, unix_s: float) -> None:
        """Take a sample.

        Args:
            status: shards that do not answer are not known at this time, and no job where a shard does not answer.
            now_s: monotonic time.
            unix_s: the sample's date.
        """
        # Rounded as it is shown: the page asks for what is newer than the newest that it was shown.
        self._unix_s[self._count % self._length] = round(unix_s, 3)
        for rows in self._rows.values():
            rows.begin(self._count)
        for shard in status.answering:
            row = self._rows["shard"].row(shard.index, self._count)
            if row is not None and shard.transport is not None:
                moved = {"in": shard.transport.received_bytes, "out": shard.transport.sent_bytes}
                rates = row.rates(moved, now_s)
                self._write(row, bytes_in_per_s=rates["in"], bytes_out_per_s=rates["out"])
        # Without a shard's part a job's counters are too small, and the next rates would be too large.
        if not status.mute:
            for name, job in status.jobs.items():
                self._record_job(name, job, now_s)
        self._count += 1

    def _record_job(self, name: str, job: JobStatus, now_s: float) -> None:
        row = self._rows["job"].row(name, self._count)
        if row is None:
            return
        refused = sum(count for reason, count in job.refused.items() if reason != "abstained")
        counts = {"applied": job.applied, "refused": refused, "sum": job.staleness_sum}
        rates = row.rates({**counts, "pushes": sum(job.staleness.values())}, now_s)
        staleness = rates["sum"] / rates["pushes"] if rates["pushes"] > 0 else math.nan
        self._write(row, applied_per_s=rates["applied"], refused_per_s=rates["refused"], staleness_mean=staleness)
        for worker in job.workers:
            row = self._rows["worker"].row((name, worker.rank), self._count)
            if row is None:
                continue
            steps_per_s = worker.steps_per_s
            if steps_per_s is None and worker.step is not None:
                steps_per_s = row.rates({"step": worker.step}, now_s)["step"]
            loss = worker.loss if isinstance(worker.loss, int | float) else None
            self._write(row, step=worker.step, loss=loss, steps_per_s=steps_per_s)

    def _write(self, row: _Row, **values: float | None) -> None:
        for field, value in values.items():
            row.series[field][self._count % self._length] = math.nan if value is None else value

    def to_text(self, since_unix_s: float = 0.0) -> str:
        """JSON: samples after ``since_unix_s``, oldest first, null where something is not known.

        Each series is encoded alone: one call of ``json`` holds the GIL to its end, and a day's would stop every shard.
        """
        slots = [number % self._length for number in range(max(0, self._count - self._length), self._count)]
        slots = [slot for slot in slots if self._unix_s[slot] > since_unix_s]

        def text_of(value: Any) -> str:
            if isinstance(value, array):
                return _dumps([_plain(value[slot]) for slot in slots])
            if isinstance(value, dict):
                return "{" + ",".join(f"{_dumps(name)}:{text_of(item)}" for name, item in value.items()) + "}"
            return "[" + ",".join(map(text_of, value)) + "]" if isinstance(value, list) else _dumps(value)

        jobs: dict[str, Any] = {name: {**row.series, "workers": {}} for name, row in self._rows["job"].rows.items()}
        for (name, rank), row in self._rows["worker"].rows.items():
            if name in jobs:
                jobs[name]["workers"][str(rank)] = row.series
        shards = [{"index": index, **row.series} for index, row in self._rows["shard"].rows.items()]
        times = _dumps([self._unix_s[slot] for slot in slots])
        return f'{{"interval_s":{self.interval_s},"unix_s":{times},"shards":{text_of(shards)},"jobs":{text_of(jobs)}}}'


class History:
    """Samples ``status`` once a second, in a thread of its own, between ``__enter__`` and ``__exit__``."""

    def __init__(self, status: Callable[[], ServerStatus]) -> None:
        self._status = status
        self._tracks = {interval_s: Track(interval_s, length) for interval_s, length in LENGTHS.items()}
        # The number of the interval that each track's newest sample was taken in.
        self._sampled = dict.fromkeys(LENGTHS, -math.inf)
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="psengine-history", daemon=True)

    def __enter__(self) -> History:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join(timeout=5.0)

    def to_text(self, resolution: int, since_unix_s: float = 0.0) -> str:
        """What /history.json shows. Callable from any thread.

        Args:
            resolution: 1 or 60, see ``LENGTHS``.
            since_unix_s: only what is newer.
        """
        # Making a day's text takes a second, and the next sample must not wait for it.
        with self._lock:
            track = copy.deepcopy(self._tracks[resolution])
        return track.to_text(since_unix_s)

    def sample(self, now_s: float, unix_s: float) -> None:
        """Record the status on the tracks whose next interval has begun."""
        due = [interval_s for interval_s in LENGTHS if now_s // interval_s > self._sampled[interval_s]]
        if not due:
            return
        status = self._status()
        with self._lock:
            for interval_s in due:
                self._sampled[interval_s] = now_s // interval_s
                self._tracks[interval_s].record(status, now_s, unix_s)

    def _run(self) -> None:
        has_failed = False
        while not self._ends.is_set():
            try:
                self.sample(time.monotonic(), time.time())
                has_failed = False
            except Exception:
                # A second without a sample is a gap in a chart; one line in the log is enough for many of them.
                logger.log(logging.DEBUG if has_failed else logging.ERROR, "no sample for the charts", exc_info=True)
                has_failed = True
            self._ends.wait(1.0 - time.monotonic() % 1.0)


def _plain(value: float) -> float | int | None:
    """Steps exactly, the rest to six digits: charts show no more, and a page loads them all."""
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else float(f"{value:.6g}")
