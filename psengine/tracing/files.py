"""Timelines as files: spans of a rank ↔ Chrome's trace format, and many ranks' parts into one.

The format is that of chrome://tracing and https://ui.perfetto.dev ("Trace Event Format", JSON object): a complete event
("X") for each span with microseconds, pid = rank, tid = track. A part keeps the times of its own host's clock and says
in ``otherData`` how that clock relates to others; ``merge`` puts all on one.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from psengine.errors import ConfigurationError
from psengine.tracing.clocks import Offset
from psengine.tracing.overlap import exchange_and_hidden_ns, hidden_fraction

# name, category, track, start and end in ns, step, args
Event = tuple[str, str, str, int, int, int, Mapping[str, Any] | None]

COMPUTE, EXCHANGE = "compute", "exchange"
TRACKS = (COMPUTE, EXCHANGE)
# Tracks split into lanes where their spans overlap; each track's first lane has a fixed number.
_LANES_A_TRACK = 1000


def trace(
    events: Sequence[Event],
    *,
    rank: int,
    process_id: int,
    host: str,
    anchor_ns: int,
    offset: Offset | None,
    dropped: int,
    device: str | None = None,
    is_synchronized: bool = False,
) -> dict[str, Any]:
    """Return one rank's spans as a trace, as a part holds them.

    Args:
        events: in any order.
        rank: of the process; its pid in the trace.
        process_id: of the process.
        host: its host's name.
        anchor_ns: the host's wall clock minus its monotonic one.
        offset: the host's monotonic clock against rank 0's, where it was measured.
        dropped: how many spans were left out because there were too many.
        device: type of the model's device; None where no model was wrapped.
        is_synchronized: whether forwards and waits were timed when the device had done its work.
    """
    described: list[dict[str, Any]] = []
    lanes: dict[int, str] = {}
    for number, track in enumerate(TRACKS):
        ordered = sorted((e for e in events if e[2] == track), key=lambda e: (e[3], -e[4]))
        for event, lane in zip(ordered, _lanes(ordered, may_nest=track == COMPUTE), strict=True):
            thread = 1 + number * _LANES_A_TRACK + lane
            lanes[thread] = track if lane == 0 else f"{track} {lane + 1}"
            name, category, _, started_ns, ended_ns, step, args = event
            described.append(
                {
                    "name": name,
                    "cat": category,
                    "ph": "X",
                    "ts": started_ns / 1000,
                    "dur": (ended_ns - started_ns) / 1000,
                    "pid": rank,
                    "tid": thread,
                    "args": {"step": step, **(args or {})},
                }
            )
    exchange_ns, hidden_ns = exchange_and_hidden_ns(
        [(started_ns, ended_ns) for _, _, track, started_ns, ended_ns, *_ in events if track == EXCHANGE],
        [(started_ns, ended_ns) for name, _, _, started_ns, ended_ns, *_ in events if name == "backward"],
    )
    process = {
        "rank": rank,
        "host": host,
        "process_id": process_id,
        "clock": _clock_identity(host),
        "wall_minus_monotonic_ns": anchor_ns,
        "offset_to_rank_0_ns": None if offset is None else offset.offset_ns,
        "offset_error_ns": None if offset is None else offset.error_ns,
        "spans_left_out": dropped,
        "exchange_ns": exchange_ns,
        "hidden_exchange_ns": hidden_ns,
    }
    names = _metadata(rank, f"rank {rank} (process {process_id} on {host})", lanes)
    return {
        "traceEvents": [*names, *described],
        "displayTimeUnit": "ms",
        "otherData": {
            "software": "psengine",
            "device": device,
            "is_synchronized": is_synchronized,
            "processes": [process],
        },
    }


def merge(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the traces of several ranks into one, with all times on one clock, in order of rank."""
    processes = [process for part in parts for process in part["otherData"]["processes"]]
    clock, shifts_ns = _common_clock(processes)
    events = []
    for part in parts:
        for event in part["traceEvents"]:
            shift_us = shifts_ns.get(event["pid"], 0) / 1000
            events.append({**event, "ts": event["ts"] + shift_us} if shift_us and "ts" in event else event)
    events.sort(key=lambda event: (event["pid"], event["ph"] != "M", event.get("ts", 0)))
    devices = {part["otherData"].get("device") for part in parts} - {None}
    other = {
        "software": "psengine",
        # Where ranks differ, the one that is not the CPU.
        "device": next(iter(sorted(devices - {"cpu"}) or sorted(devices)), None),
        "is_synchronized": all(part["otherData"].get("is_synchronized", False) for part in parts),
        "clock": clock,
        "hidden_exchange": hidden_fraction(processes),
        "processes": sorted(processes, key=lambda p: int(p["rank"])),
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


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
        is_trace = all({"pid", "ph"} <= event.keys() for event in found["traceEvents"])
        is_trace = is_trace and all("rank" in process for process in found["otherData"]["processes"])
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{os.fspath(path)} is no timeline (expected JSON, got {error})") from error
    except (TypeError, LookupError, AttributeError):
        is_trace = False
    if not is_trace:
        raise ConfigurationError(
            f"{os.fspath(path)} is no timeline of psengine (expected an object with traceEvents and otherData)"
        )
    return found


def write(described: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a trace atomically."""
    temporary = Path(f"{os.fspath(path)}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(_to_json(described))
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


def encode(described: Mapping[str, Any]) -> bytes:
    """A trace as bytes, to be sent."""
    return zlib.compress(_to_json(described), 1)


def decode(payload: bytes) -> dict[str, Any]:
    """The trace that ``encode`` was given."""
    return json.loads(zlib.decompress(payload))  # type: ignore[no-any-return]


def _to_json(described: Mapping[str, Any]) -> bytes:
    # ensure_ascii=False would let a lone surrogate of a strange parameter name through, which is no UTF-8.
    return json.dumps(described, separators=(",", ":"), allow_nan=False, default=str).encode()


def _lanes(ordered: Sequence[Event], *, may_nest: bool) -> list[int]:
    """The lane of each span, sorted by start; in a lane spans nest or follow each other, as viewers expect."""
    open_ends: list[list[int]] = []
    chosen = []
    for *_, started_ns, ended_ns, _step, _args in ordered:
        for ends in open_ends:
            while ends and ends[-1] <= started_ns:
                ends.pop()
        fits = [lane for lane, ends in enumerate(open_ends) if not ends or (may_nest and ended_ns <= ends[-1])]
        lane = fits[0] if fits else len(open_ends)
        if not fits:
            open_ends.append([])
        open_ends[lane].append(ended_ns)
        chosen.append(min(lane, _LANES_A_TRACK - 1))
    return chosen


def _metadata(rank: int, process_name: str, lanes: Mapping[int, str]) -> list[dict[str, Any]]:
    def entry(kind: str, thread: int, **args: Any) -> dict[str, Any]:
        return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": args}

    found = [entry("process_name", 0, name=process_name), entry("process_sort_index", 0, sort_index=rank)]
    for thread, name in sorted(lanes.items()):
        found.append(entry("thread_name", thread, name=name))
        found.append(entry("thread_sort_index", thread, sort_index=thread))
    return found


def _clock_identity(host: str) -> str:
    """Equal for processes that read the same monotonic clock, such as containers of one kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return host


def _common_clock(processes: Sequence[Mapping[str, Any]]) -> tuple[str, dict[int, int]]:
    """The clock of all times, in words, and the nanoseconds to add to each rank's times."""
    if len({process.get("clock") for process in processes}) <= 1:
        return "CLOCK_MONOTONIC of the one host", {}
    offsets = {int(process["rank"]): process.get("offset_to_rank_0_ns") for process in processes}
    measured = {rank: offset for rank, offset in offsets.items() if isinstance(offset, int)}
    if len(measured) == len(offsets):
        error_ns = max(process["offset_error_ns"] for process in processes)
        words = f"CLOCK_MONOTONIC of rank 0's host; others were compared when recording began, within {error_ns} ns"
        return words, measured
    # Without a group no clocks were compared; hosts that keep time by NTP agree within a millisecond or so.
    anchors = {process["rank"]: process.get("wall_minus_monotonic_ns") or 0 for process in processes}
    return "the hosts' wall clocks, as far as they agree", anchors
