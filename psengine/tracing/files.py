"""Timelines as files in Chrome's trace format: one rank's spans, and many ranks' files merged into one.

The format is that of chrome://tracing and https://ui.perfetto.dev ("Trace Event Format", JSON object): a complete event
("X") for each span, in microseconds by the host's wall clock; pid = rank, tid = track.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from psengine.errors import ConfigurationError

# name, category, track, start and end in ns, step, args
Event = tuple[str, str, str, int, int, int, Mapping[str, Any] | None]

COMPUTE, EXCHANGE = "compute", "exchange"
# The exchange track has a thread for each span that overlaps the others, as viewers expect.
_COMPUTE_THREAD, _FIRST_EXCHANGE_THREAD = 1, 2
# Times count from 2026-01-01: microseconds since 1970 as floats would be rounded to quarters.
_ORIGIN_NS = 1_767_225_600 * 10**9


def trace(events: Sequence[Event], *, rank: int, dropped: int) -> dict[str, Any]:
    """Return this process's spans as a trace.

    Args:
        events: in any order; those of the track "compute" nest or follow each other.
        rank: of the process; its pid in the trace.
        dropped: how many spans were left out because there were too many.
    """
    described: list[dict[str, Any]] = []
    threads = {_COMPUTE_THREAD: COMPUTE}
    lane_ends_ns: list[int] = []
    for name, category, track, started_ns, ended_ns, step, args in sorted(events, key=lambda e: (e[3], -e[4])):
        thread = _COMPUTE_THREAD
        if track == EXCHANGE:
            free = (lane for lane, end_ns in enumerate(lane_ends_ns) if end_ns <= started_ns)
            lane = next(free, len(lane_ends_ns))
            lane_ends_ns[lane : lane + 1] = [ended_ns]
            thread = _FIRST_EXCHANGE_THREAD + lane
            threads[thread] = EXCHANGE if lane == 0 else f"{EXCHANGE} {lane + 1}"
        described.append(
            {
                "name": name,
                "cat": category,
                "ph": "X",
                "ts": (started_ns - _ORIGIN_NS) / 1000,
                "dur": max(0, ended_ns - started_ns) / 1000,  # the clock may have been set back
                "pid": rank,
                "tid": thread,
                "args": {"step": step, **(args or {})},
            }
        )
    process_id, host = os.getpid(), socket.gethostname()
    names: list[dict[str, Any]] = [
        {
            "name": "process_name",
            "ph": "M",
            "pid": rank,
            "args": {"name": f"rank {rank} (process {process_id}, {host})"},
        },
        {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}},
    ]
    for thread, name in threads.items():
        at = {"ph": "M", "pid": rank, "tid": thread}
        names.append({"name": "thread_name", **at, "args": {"name": name}})
        names.append({"name": "thread_sort_index", **at, "args": {"sort_index": thread}})
    process = {"rank": rank, "host": host, "process_id": process_id, "spans_left_out": dropped}
    return {
        "traceEvents": [*names, *described],
        "displayTimeUnit": "ms",
        "otherData": {"software": "psengine", "processes": [process]},
    }


def merge(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the traces of several ranks into one, in order of rank."""
    ordered = sorted(parts, key=lambda part: [process["rank"] for process in part["otherData"]["processes"]])
    processes = [process for part in ordered for process in part["otherData"]["processes"]]
    return {
        "traceEvents": [event for part in ordered for event in part["traceEvents"]],
        "displayTimeUnit": "ms",
        "otherData": {"software": "psengine", "processes": processes},
    }


def merge_parts(parts: Sequence[str | os.PathLike[str]], path: str | os.PathLike[str]) -> dict[str, Any]:
    """Join the files ``parts``, each a rank's own ``out.json.rank<r>``, into the file ``path``; return the trace.

    Raises:
        ConfigurationError: there are no parts, or one of them cannot be read or is no timeline.
        OSError: ``path`` cannot be written.
    """
    if not parts:
        raise ConfigurationError("a timeline is merged from the ranks' parts (expected at least one, got none)")
    merged = merge([read(part) for part in parts])
    write(merged, path)
    return merged


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a trace that ``write`` wrote.

    Raises:
        ConfigurationError: it cannot be read, or is no timeline of psengine.
    """
    try:
        found: dict[str, Any] = json.loads(Path(path).read_bytes())
        for event in found["traceEvents"]:
            event["pid"], event["ph"]
        for process in found["otherData"]["processes"]:
            process["rank"]
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ConfigurationError(
            f"{os.fspath(path)} is no timeline of psengine (expected JSON with traceEvents and otherData, got"
            f" {type(error).__name__}: {error})"
        ) from error
    return found


def write(described: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a trace atomically."""
    temporary = Path(f"{os.fspath(path)}.{os.getpid()}.tmp")
    try:
        # ensure_ascii: a lone surrogate of a strange parameter name is no UTF-8.
        temporary.write_text(json.dumps(described, separators=(",", ":"), allow_nan=False, default=str))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def part_path(path: str | os.PathLike[str], rank: int) -> Path:
    """The path of ``rank``'s part of the timeline ``path``."""
    return Path(f"{os.fspath(path)}.rank{rank}")


def find_parts(path: str | os.PathLike[str]) -> list[Path]:
    """The existing parts of the timeline ``path``, in order of rank."""
    place = Path(path)
    prefix = f"{place.name}.rank"
    found = [part for part in place.parent.glob(f"{prefix}*") if part.name.removeprefix(prefix).isdecimal()]
    return sorted(found, key=lambda part: int(part.name.removeprefix(prefix)))
