"""What the status was: rings of samples in memory, so that charts need no database.

    History (a thread) ── once a second ──► status ──┬─► Track: 600 samples, 1 s apart      the last ten minutes
                                                     └─► Track: 1440 samples, 60 s apart    the last day

Counters become rates per second between two samples of a track; NaN stands for what is not known.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

logger = logging.getLogger(__name__)

_dumps = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode

LENGTHS = {1: 600, 60: 1440}
# Memory stays bounded whoever comes: workers cost 24 bytes a sample, 12.5 MB in all with both tracks full.
MAX_WORKERS = 256
MAX_JOBS = 64
MAX_SHARDS = 256


class _Row:
    """The series of one shard, job or worker.

    Attributes:
        series: by field, as long as the track; what is not known is NaN.
        counters: the newest counts, of which rates are differences, and when they were taken.
        seen: number of the newest sample it was part of.
    """

    __slots__ = ("counted_s", "counters", "seen", "series")

    def __init__(self, fields: Sequence[str], length: int) -> None:
        self.series = {field: array("d", [math.nan]) * length for field in fields}
        self.counters: dict[str, float] = {}
        self.counted_s = -math.inf
        self.seen = -1

    def rates(self, counts: Mapping[str, float], now_s: float) -> dict[str, float]:
        """Per second since the last call; NaN at the first, and where a counter began anew."""
        elapsed_s = now_s - self.counted_s
        found = {}
        for name, count in counts.items():
            before = self.counters.get(name, math.inf)
            is_known = count >= before and 0.0 < elapsed_s < math.inf
            found[name] = (count - before) / elapsed_s if is_known else math.nan
        self.counters, self.counted_s = dict(counts), now_s
        return found


class _Rows:
    """At most ``most`` rows with the same fields; who was not seen for a whole track is forgotten."""

    def __init__(self, fields: Sequence[str], most: int, length: int) -> None:
        self._fields, self._most, self._length = fields, most, length
        self.rows: dict[Any, _Row] = {}
        # Who was not part of the sample before this one, the longest gone last.
        self._replaceable: list[Any] = []

    def begin(self, number: int) -> None:
        """Sample ``number`` begins: nothing is known of anybody."""
        slot = number % self._length
        for key, row in list(self.rows.items()):
            if number - row.seen >= self._length:
                del self.rows[key]
            else:
                for series in row.series.values():
                    series[slot] = math.nan
        gone = (key for key, row in self.rows.items() if row.seen < number - 1)
        self._replaceable = sorted(gone, key=lambda key: self.rows[key].seen, reverse=True)

    def row(self, key: Any, number: int) -> _Row | None:
        """The row of ``key``, which is part of sample ``number``; None where there is no room."""
        row = self.rows.get(key)
        if row is None:
            if len(self.rows) >= self._most and not self._make_room(number):
                return None
            row = self.rows[key] = _Row(self._fields, self._length)
        row.seen = number
        return row

    def _make_room(self, number: int) -> bool:
        while self._replaceable:
            key = self._replaceable.pop()
            if self.rows[key].seen != number:  # it did not come back
                del self.rows[key]
                return True
        return False


class Track:
    """Samples at one distance; not thread-safe.

    Args:
        interval_s: distance of samples.
        length: how many are kept.
        most_workers: how many workers, of all jobs, are followed; newcomers replace who has been gone the longest.
        most_jobs: the same of jobs.
    """

    def __init__(
        self, interval_s: int, length: int, *, most_workers: int = MAX_WORKERS, most_jobs: int = MAX_JOBS
    ) -> None:
        self.interval_s = interval_s
        self._length = length
        self._unix_s = array("d", [math.nan]) * length
        self._count = 0
        self._shards = _Rows(("bytes_in_per_s", "bytes_out_per_s"), MAX_SHARDS, length)
        self._jobs = _Rows(("applied_per_s", "refused_per_s", "staleness_mean"), most_jobs, length)
        self._workers = _Rows(("step", "loss", "steps_per_s"), most_workers, length)

    def record(self, status: Mapping[str, Any], now_s: float, unix_s: float) -> None:
        """Take a sample of what /status.json shows.

        Args:
            status: shards that do not answer, and fields that are not there, are not known at this time; nor is any job
                where a shard does not answer.
            now_s: monotonic time.
            unix_s: what the sample is dated.
        """
        number, slot = self._count, self._count % self._length
        # As it is shown: whoever asks for what is newer names it.
        self._unix_s[slot] = round(unix_s, 3)
        for rows in (self._shards, self._jobs, self._workers):
            rows.begin(number)
        for shard in status.get("shards", ()):
            transport = shard.get("transport")
            row = self._shards.row(shard["index"], number) if transport else None
            if row is not None:
                counts = {
                    "bytes_in_per_s": transport["received_bytes"],
                    "bytes_out_per_s": transport["sent_bytes"],
                }
                _write(row, slot, row.rates(counts, now_s))
        # Without a shard's part a job's counters are too small, and the next rates would be too large.
        is_whole = not any("error" in shard for shard in status.get("shards", ()))
        for name, job in status.get("jobs", {}).items() if is_whole else ():
            self._record_job(name, job, number, now_s)
        self._count += 1

    def _record_job(self, name: str, job: Mapping[str, Any], number: int, now_s: float) -> None:
        slot = number % self._length
        row = self._jobs.row(name, number)
        if row is None:
            return
        rates = row.rates(
            {
                "applied_per_s": job.get("applied", 0),
                "refused_per_s": sum(n for reason, n in job.get("refused", {}).items() if reason != "abstained"),
                "pushes": sum(job.get("staleness", {}).values()),
                "staleness": job.get("staleness_sum", 0),
            },
            now_s,
        )
        pushes, staleness_sum = rates.pop("pushes"), rates.pop("staleness")
        rates["staleness_mean"] = staleness_sum / pushes if pushes > 0 else math.nan
        _write(row, slot, rates)
        for worker in job.get("workers", ()):
            row = self._workers.row((name, worker["rank"]), number)
            if row is None:
                continue
            step = _number(worker.get("step"))
            steps_per_s = _number(worker.get("steps_per_s"))
            if math.isnan(steps_per_s) and not math.isnan(step):
                steps_per_s = row.rates({"step": step}, now_s)["step"]
            _write(row, slot, {"step": step, "loss": _number(worker.get("loss")), "steps_per_s": steps_per_s})

    def to_text(self, since_unix_s: float = 0.0) -> str:
        """JSON: samples after ``since_unix_s``, oldest first, null where something is not known.

        One series at a time: one call of ``json`` holds the GIL to its end, and a day's would stop every shard.
        """
        first = max(0, self._count - self._length)
        slots = [n % self._length for n in range(first, self._count)]
        slots = [slot for slot in slots if self._unix_s[slot] > since_unix_s]

        def text_of(value: Any) -> str:
            if isinstance(value, array):
                return _dumps([_plain(value[slot]) for slot in slots])
            if isinstance(value, dict):
                return "{" + ",".join(f"{_dumps(name)}:{text_of(item)}" for name, item in value.items()) + "}"
            return _dumps(value)

        jobs: dict[Any, dict[str, Any]] = {name: {**row.series, "workers": {}} for name, row in self._jobs.rows.items()}
        for (name, rank), row in self._workers.rows.items():
            if name in jobs:
                jobs[name]["workers"][str(rank)] = row.series
        shards = [text_of({"index": index, **row.series}) for index, row in self._shards.rows.items()]
        times = _dumps([self._unix_s[slot] for slot in slots])
        return (
            f'{{"interval_s":{self.interval_s},"unix_s":{times},"shards":[{",".join(shards)}],"jobs":{text_of(jobs)}}}'
        )


class History:
    """Samples ``status`` once a second, in a thread of its own, between ``__enter__`` and ``__exit__``.

    Args:
        status: what /status.json shows.
    """

    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        self._status = status
        self._tracks = {interval_s: Track(interval_s, length) for interval_s, length in LENGTHS.items()}
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
        # Making a day's text takes a second, which the next sample does not wait for.
        with self._lock:
            track = copy.deepcopy(self._tracks[resolution])
        return track.to_text(since_unix_s)

    def _run(self) -> None:
        due_s = dict.fromkeys(self._tracks, time.monotonic())
        has_failed = False
        while not self._ends.is_set():
            try:
                status = self._status()
                now_s, unix_s = time.monotonic(), time.time()
                with self._lock:
                    for interval_s, track in self._tracks.items():
                        if now_s >= due_s[interval_s]:
                            track.record(status, now_s, unix_s)
                has_failed = False
            except Exception:
                # A second without a sample is a gap in a chart; one line in the log is enough for many of them.
                logger.log(logging.DEBUG if has_failed else logging.ERROR, "no sample for the charts", exc_info=True)
                has_failed = True
            now_s = time.monotonic()
            for interval_s in due_s:
                while due_s[interval_s] <= now_s:
                    due_s[interval_s] += interval_s
            self._ends.wait(min(due_s.values()) - now_s)


def _write(row: _Row, slot: int, values: Mapping[str, float]) -> None:
    for field, value in values.items():
        row.series[field][slot] = value


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _plain(value: float) -> float | int | None:
    """Steps exactly, the rest to six digits: charts show no more, and a page loads them all."""
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else float(f"{value:.6g}")
