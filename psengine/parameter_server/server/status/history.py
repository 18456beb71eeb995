"""Samples of the status in memory, so that charts need no database.

    History (a thread) ── once a second ──► status ──┬─► Track: 600 samples, 1 s apart      the last ten minutes
                                                     └─► Track: 1440 samples, 60 s apart    the last day

Counters become rates per second between two samples of a track. NaN means unknown.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from psengine.parameter_server.status_model import NOT_FINITE, ServerStatus, WorkerStatus

logger = logging.getLogger(__name__)

_dumps = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode

LENGTHS = {1: 600, 60: 1440}
FIELDS = {
    "shard": ("bytes_in_per_s", "bytes_out_per_s"),
    "job": ("applied_per_s", "refused_per_s", "staleness_mean"),
    "worker": ("step", "loss", "steps_per_s"),
}
# Shards, jobs and workers together. Bounds memory: a row costs 24 bytes a sample, 15 MB in all with both tracks full.
MAX_ROWS = 320


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

    def rates(self, now_s: float, **counts: float) -> dict[str, float]:
        """Per second since the last call; NaN at the first, and where a counter began anew."""
        elapsed_s = now_s - self._counted_s
        found = {}
        for name, count in counts.items():
            before = self._counts.get(name, math.inf)
            is_known = count >= before and 0.0 < elapsed_s < math.inf
            found[name] = (count - before) / elapsed_s if is_known else math.nan
        self._counts, self._counted_s = counts, now_s
        return found


_Sample = tuple[tuple[Any, ...], Mapping[str, float], Callable[[dict[str, float]], Sequence[float | None]]]


def _samples(status: ServerStatus) -> Iterator[_Sample]:
    """Of each row: its key, counters, and the values of its fields, given the counters' rates."""
    for shard in status.answering:
        # Payloads, also those in shared memory, of which the socket knows nothing.
        moved = {name: sum(getattr(job, name) for job in shard.jobs.values()) for name in ("bytes_in", "bytes_out")}
        yield ("shard", shard.index), moved, lambda rates: list(rates.values())
    # Without a shard's part a job's counters are too small, and the next rates would be too large.
    for name, job in status.jobs.items() if not status.mute else ():
        counts = {
            "applied": job.applied,
            "refused": sum(count for reason, count in job.refused.items() if reason != "abstained"),
            "staleness": job.staleness_sum,
            "pushes": sum(job.staleness.values()),
        }
        yield ("job", name), counts, _of_job
        for worker in job.workers:
            yield ("worker", name, worker.rank), {"steps": worker.step or 0}, partial(_of_worker, worker)


def _of_job(rates: dict[str, float]) -> Sequence[float]:
    staleness = rates["staleness"] / rates["pushes"] if rates["pushes"] > 0 else math.nan
    return rates["applied"], rates["refused"], staleness


def _of_worker(worker: WorkerStatus, rates: dict[str, float]) -> Sequence[float | None]:
    steps_per_s = rates["steps"] if worker.steps_per_s is None and worker.step is not None else worker.steps_per_s
    return worker.step, worker.loss if worker.loss != NOT_FINITE else None, steps_per_s


class Track:
    """Samples at one distance; not thread-safe.

    A row that was missing for the whole track is forgotten. Where there is no room, a new row replaces the one that has
    been missing the longest, if any is missing.

    Args:
        interval_s: distance of samples.
        length: how many are kept.
        max_rows: how many shards, jobs and workers are followed.
    """

    def __init__(self, interval_s: int, length: int, max_rows: int = MAX_ROWS) -> None:
        self.interval_s = interval_s
        self._length = length
        self._max_rows = max_rows
        self._unix_s = array("d", [math.nan]) * length
        self._count = 0
        # By ("shard", index), ("job", name) or ("worker", name of the job, rank); the last seen row at the end.
        self._rows: dict[tuple[Any, ...], _Row] = {}

    def record(self, status: ServerStatus, now_s: float, unix_s: float) -> None:
        """Take a sample.

        Args:
            status: a shard that does not answer leaves a gap in its own series, and in those of all jobs.
            now_s: monotonic time.
            unix_s: the sample's date.
        """
        slot = self._count % self._length
        # Rounded as it is shown: the page asks for samples newer than the newest that it has.
        self._unix_s[slot] = round(unix_s, 3)
        self._rows = {key: row for key, row in self._rows.items() if self._count - row.seen < self._length}
        for row in self._rows.values():
            for series in row.series.values():
                series[slot] = math.nan
        for key, counts, values_of in _samples(status):
            found = self._row(*key)
            if found is not None:
                values = values_of(found.rates(now_s, **counts))
                for series, value in zip(found.series.values(), values, strict=True):
                    series[slot] = math.nan if value is None else value
        self._count += 1

    def _row(self, *key: Any) -> _Row | None:
        """The row of ``key`` as part of the current sample; None where there is no room."""
        row = self._rows.pop(key, None)
        if row is None:
            if len(self._rows) >= self._max_rows:
                longest_missing = next(iter(self._rows))
                if self._rows[longest_missing].seen >= self._count - 1:
                    return None
                del self._rows[longest_missing]
            row = _Row(FIELDS[key[0]], self._length)
        self._rows[key] = row
        row.seen = self._count
        return row

    def to_text(self, since_unix_s: float = 0.0) -> str:
        """JSON: samples after ``since_unix_s``, oldest first; null means unknown.

        Each series is encoded alone: one call of ``json`` holds the GIL to its end, and a day's would stop every shard.
        """
        slots = [number % self._length for number in range(max(0, self._count - self._length), self._count)]
        slots = [slot for slot in slots if self._unix_s[slot] > since_unix_s]

        def text_of(value: Any) -> str:
            if isinstance(value, array):
                return _dumps([_plain(value[slot]) for slot in slots])
            if isinstance(value, dict):
                return "{" + ",".join(f"{_dumps(str(name))}:{text_of(item)}" for name, item in value.items()) + "}"
            return "[" + ",".join(map(text_of, value)) + "]" if isinstance(value, list) else _dumps(value)

        shards: list[Any] = []
        jobs: dict[str, dict[str, Any]] = {}
        for (kind, name, *rank), row in sorted(self._rows.items()):
            if kind == "shard":
                shards.append({"index": name, **row.series})
            elif kind == "job":
                jobs[name] = {**row.series, "workers": {}}
            elif name in jobs:
                jobs[name]["workers"][rank[0]] = row.series
        unix_s = [self._unix_s[slot] for slot in slots]
        return text_of({"interval_s": self.interval_s, "unix_s": unix_s, "shards": shards, "jobs": jobs})


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
        """The content of /history.json. Callable from any thread.

        Args:
            resolution: 1 or 60, see ``LENGTHS``.
            since_unix_s: only newer samples.
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
                # A missing sample is a gap in a chart; many in a row need one line in the log.
                logger.log(logging.DEBUG if has_failed else logging.ERROR, "no sample for the charts", exc_info=True)
                has_failed = True
            self._ends.wait(1.0 - time.monotonic() % 1.0)


def _plain(value: float) -> float | int | None:
    """A step exactly, other values to six digits, which charts need."""
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else float(f"{value:.6g}")
