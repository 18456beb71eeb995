"""A timeline: spans of this process, recorded while somebody wants them, and written in Chrome's trace format.

Recording is off unless ``psengine.timeline`` or ``PSENGINE_TIMELINE`` turned it on; a span then costs one look at
``recorder.is_on``. Each rank writes a part, ``out.json.rank<r>``, and ``merge_parts`` joins them::

    with span("pack", bucket.facts, step=3):              a block
        ...
    push = span("push", bucket.facts, track=EXCHANGE)     or from here
    push.close()                                          to here

The format is that of chrome://tracing and https://ui.perfetto.dev ("Trace Event Format", JSON object): a complete event
("X") for each span, in microseconds by the host's wall clock; pid = rank, tid = track. Hosts' clocks agree as far as
NTP makes them. docs/diagnosis.md has the names of the spans and how to read them.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel.distributed import _find_tensors

from psengine.environment.context import before_shutdown, world_place
from psengine.environment.launchers import read_integer
from psengine.environment.variables import inherited_variables, read_variable
from psengine.errors import ConfigurationError, EnvironmentVariableError, PSEngineError
from psengine.tracing.observers import observing

logger = logging.getLogger(__name__)

COMPUTE, EXCHANGE = "compute", "exchange"
# Of about 200 bytes each, five times that while the file is written: some thousand steps. Later ones are left out.
MAX_SPANS = 200_000
# Times count from 2026-01-01: microseconds since 1970 as floats would be rounded to quarters.
_ORIGIN_NS = 1_767_225_600 * 10**9


class Span:
    """Time from the creation until ``close``, or until the end of the block.

    Attributes:
        name: what it is; see docs/diagnosis.md.
        category: "collective" for waits whose name says what for, else the name.
        track: COMPUTE for the host's own time, EXCHANGE for work elsewhere.
        step: the model's iteration.
        facts: to show; not copied.
    """

    def __init__(self, name: str, category: str, track: str, step: int, facts: Mapping[str, Any] | None) -> None:
        self.name = name
        self.category = category
        self.track = track
        self.step = step
        self.facts = facts
        self.is_wait = category in ("wait", "collective")
        recorder.open_waits += self.is_wait
        self.started_ns = recorder.settled_ns() if self.is_wait else time.time_ns()
        self.ended_ns = 0

    def __enter__(self) -> Span:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """It ends now."""
        self.ended_ns = recorder.settled_ns() if self.is_wait else time.time_ns()
        recorder.open_waits -= self.is_wait
        # A wait inside another would be counted twice.
        if not (self.is_wait and recorder.open_waits):
            recorder.add(self)


class _NoSpan(Span):
    """What there is of a span while nobody records."""

    def __init__(self) -> None:
        pass

    def close(self) -> None:
        pass


class Recorder:
    """Collects spans of this process; there is one, ``recorder``.

    Attributes:
        is_on: whether anybody wants spans now.
        step: of the latest training forward, for spans that know no step of their own.
        worker_rank: this process's at its parameter servers; None for that in the default group.
        open_waits: how many spans of waits are open.
        synchronizes: whether ``settled_ns`` waits for the accelerator.
        whole_run: the file that PSENGINE_TIMELINE names and the last step in it; None before its recording.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.step = 0
        self.worker_rank: int | None = None
        self.open_waits = 0
        self.synchronizes = False
        self.whole_run: tuple[Path, int] | None = None
        # The spans of each recording under way, by the file that it is for.
        self._recordings: dict[Path, list[Span]] = {}

    def settled_ns(self) -> int:
        """The time; where the recording ``synchronizes``, once the device has done what this thread's stream holds.

        On a GPU the host launches work and runs ahead. A wait that begins and ends at settled times is the device's:
        from the end of this rank's own work to the arrival of the result. Other streams, such as NCCL's, are not waited
        for: an exchange may still overlap with backward.
        """
        if self.synchronizes and torch.accelerator.is_available() and not torch.compiler.is_compiling():
            torch.accelerator.current_stream().synchronize()
        return time.time_ns()

    def begin(self, path: Path) -> None:
        """Begin the recording for ``path``."""
        self.synchronizes = read_variable("PSENGINE_TIMELINE_SYNCHRONIZE") == "1"
        self._recordings[path] = []
        self.is_on = True

    def end(self, path: Path) -> None:
        """End it, and write this rank's part of ``path``; nothing where it has ended. An error is logged."""
        spans = self._recordings.pop(path, None)
        self.is_on = bool(self._recordings)
        if spans is None:
            return
        rank = world_place()[0] if self.worker_rank is None else self.worker_rank
        part = part_path(path, rank)
        process = {"rank": rank, "host": socket.gethostname(), "process_id": os.getpid()}
        with observing(f"the timeline of rank {rank}"):
            _write(_chrome_events(spans, process), [process], part)
            logger.info("timeline of rank %d written to %s", rank, part)

    def begin_step(self, iteration: int) -> None:
        """A training forward begins, the ``iteration``-th of its model."""
        self.step = iteration
        if self.whole_run is not None and iteration > self.whole_run[1]:
            self.end(self.whole_run[0])

    def add(self, span: Span) -> None:
        """Keep a span that has ended."""
        for spans in tuple(self._recordings.values()):
            if len(spans) < MAX_SPANS:
                spans.append(span)
                if len(spans) == MAX_SPANS:
                    logger.warning("the timeline is full after %d spans; later ones are left out", MAX_SPANS)


recorder = Recorder()
if hasattr(os, "register_at_fork"):  # not on Windows
    # The parent writes what it has recorded.
    os.register_at_fork(after_in_child=recorder.__init__)  # type: ignore[misc]
_NO_SPAN = _NoSpan()


def span(
    name: str,
    facts: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    track: str = COMPUTE,
    category: str | None = None,
) -> Span:
    """Begin a span; see ``Span``. ``step`` None is the latest, ``category`` None the name."""
    if not recorder.is_on:
        return _NO_SPAN
    return Span(name, category or name, track, recorder.step if step is None else step, facts)


# ---- forward and backward ----------------------------------------------------------------------------------------

# Users' structures may raise when they are searched for tensors.
_BACKWARD_OF_A_FORWARD = "on the timeline, the backward of a forward"


def end_forward(forward: Span, step: int, inputs: Any, output: Any) -> None:
    """End the span of a forward, and watch ``output`` for the backward of ``step``."""
    if not recorder.is_on or torch.compiler.is_compiling():
        return
    forward.step = step
    forward.close()
    with observing("on the timeline, the number of samples of a forward"):
        samples = next((tensor.shape[0] for tensor in _find_tensors(inputs) if tensor.dim() > 0), None)
        forward.facts = {"samples": samples}
    if not torch.is_grad_enabled():
        return
    backwards: list[Span] = []

    @observing(_BACKWARD_OF_A_FORWARD)
    def begin(_gradient: torch.Tensor) -> None:
        if not backwards and recorder.is_on and not torch.compiler.is_compiling():
            backwards.append(span("backward", step=step))
            # Callbacks run in order, so this one comes before the reducer's, which waits for the other ranks.
            torch.autograd.Variable._execution_engine.queue_callback(lambda: backwards.pop().close())

    with observing(_BACKWARD_OF_A_FORWARD):
        for tensor in _find_tensors(output):
            # A leaf (an output that is a parameter) would keep the hook for good.
            if tensor.grad_fn is not None:
                tensor.register_hook(begin)


# Whether torch's profiler runs.
is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled


def profiled(what: str) -> torch.autograd.profiler.record_function:
    """Let torch's profiler show an operation in shared memory, such as "all-reduce of gradient bucket 3 (...)", as
    "psengine:all_reduce" with the rest as its argument.
    """
    verb, _, rest = what.partition(" of ")
    return torch.autograd.profiler.record_function(f"psengine:{verb.replace('-', '_').replace(' ', '_')}", rest)


# ---- files -------------------------------------------------------------------------------------------------------


def _chrome_events(spans: Sequence[Span], process: Mapping[str, Any]) -> list[dict[str, Any]]:
    rank = process["rank"]
    events: list[dict[str, Any]] = []
    # Spans of exchanges that overlap need a thread each; viewers nest the spans of one thread.
    lane_ends_ns: list[int] = []
    threads = {1: COMPUTE}
    for one in sorted(spans, key=lambda one: (one.started_ns, -one.ended_ns)):
        thread = 1
        if one.track == EXCHANGE:
            free = (lane for lane, end_ns in enumerate(lane_ends_ns) if end_ns <= one.started_ns)
            lane = next(free, len(lane_ends_ns))
            lane_ends_ns[lane : lane + 1] = [one.ended_ns]
            thread = 2 + lane
            threads[thread] = EXCHANGE if lane == 0 else f"{EXCHANGE} {lane + 1}"
        events.append(
            {
                "name": one.name,
                "cat": one.category,
                "ph": "X",
                "ts": (one.started_ns - _ORIGIN_NS) / 1000,
                "dur": max(0, one.ended_ns - one.started_ns) / 1000,  # the clock may have been set back
                "pid": rank,
                "tid": thread,
                "args": {"step": one.step, **(one.facts or {})},
            }
        )

    def about(kind: str, thread: int, **args: Any) -> dict[str, Any]:
        return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": args}

    described = f"rank {rank} (process {process['process_id']}, {process['host']})"
    names = [about("process_name", 0, name=described), about("process_sort_index", 0, sort_index=rank)]
    names += [about("thread_name", thread, name=name) for thread, name in threads.items()]
    return names + events


def _write(events: Sequence[Any], processes: Sequence[Any], path: Path) -> dict[str, Any]:
    trace = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"software": "psengine", "processes": processes},
    }
    temporary = Path(f"{path}.{os.getpid()}.tmp")
    # ensure_ascii: a lone surrogate of a strange parameter name is no UTF-8.
    temporary.write_text(json.dumps(trace, separators=(",", ":"), allow_nan=False, default=str))
    temporary.replace(path)
    return trace


def part_path(path: Path, rank: int) -> Path:
    """The path of ``rank``'s part of the timeline ``path``."""
    return path.with_name(f"{path.name}.rank{rank}")


def find_parts(path: Path) -> list[Path]:
    """The existing parts of the timeline ``path``, in order of rank."""
    ranks = (part.name.removeprefix(f"{path.name}.rank") for part in path.parent.iterdir())
    return [part_path(path, rank) for rank in sorted(int(rank) for rank in ranks if rank.isdecimal())]


def merge_parts(parts: Sequence[str | os.PathLike[str]], path: str | os.PathLike[str]) -> dict[str, Any]:
    """Join the files ``parts``, each a rank's own ``out.json.rank<r>``, into the file ``path``; return the trace.

    Raises:
        ConfigurationError: there are no parts, or one of them cannot be read or is no timeline.
        OSError: ``path`` cannot be written.
    """
    if not parts:
        raise ConfigurationError("a timeline is merged from the ranks' parts (expected at least one, got none)")
    found: list[tuple[int, dict[str, Any], list[Any]]] = []
    for part in parts:
        try:
            trace = json.loads(Path(part).read_bytes())
            (process,) = trace["otherData"]["processes"]
            found.append((process["rank"], process, list(trace["traceEvents"])))
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise ConfigurationError(
                f"{os.fspath(part)} is no part of a timeline of psengine (expected JSON with traceEvents and one"
                f" process in otherData, got {type(error).__name__}: {error})"
            ) from error
    found.sort(key=lambda part: part[0])
    events = [event for _, _, of_rank in found for event in of_rank]
    return _write(events, [process for _, process, _ in found], Path(path))


# ---- who records -------------------------------------------------------------------------------------------------


@contextmanager
def timeline(path: str | os.PathLike[str]) -> Iterator[None]:
    """Record what this rank does inside the block, and write it for https://ui.perfetto.dev or chrome://tracing.

    Every rank of the process group enters and leaves the block; rank 0 then merges the files of the ranks on its host.
    After an exception inside the block, and with workers over parameter servers, each rank writes its own
    ``path.rank<r>`` instead, without waiting; ``psengine.tracing.timeline.merge_parts`` joins those. docs/diagnosis.md
    lists the spans and their cost.

    Args:
        path: of the file, JSON; overwritten.

    Raises:
        ConfigurationError: there is no such folder.
    """
    path = _checked_path(path, ConfigurationError, "psengine.timeline")
    recorder.begin(path)
    try:
        yield
    finally:
        recorder.end(path)
    if recorder.worker_rank is not None:
        return
    with observing("the merged timeline"):  # each rank has its own
        if dist.is_initialized():
            dist.barrier()
        rank, world_size = world_place()
        if rank == 0:
            parts = [part for part in map(part_path, [path] * world_size, range(world_size)) if part.exists()]
            merge_parts(parts, path)
            for part in parts:
                part.unlink()
            logger.info("timeline of %d ranks written to %s", len(parts), path)


def model_wrapped(worker_rank: int | None) -> None:
    """A model was wrapped, whose strategy gives this process ``worker_rank``: record where PSENGINE_TIMELINE says so.

    Raises:
        EnvironmentVariableError: PSENGINE_TIMELINE names no writable place, or PSENGINE_TIMELINE_STEPS no number.
    """
    recorder.worker_rank = worker_rank
    text = read_variable("PSENGINE_TIMELINE")
    if not text or recorder.whole_run is not None:
        return
    path = _checked_path(text, EnvironmentVariableError, "PSENGINE_TIMELINE")
    last_step = read_integer(inherited_variables(), "PSENGINE_TIMELINE_STEPS", 1, 2**31 - 1)
    recorder.whole_run = path, last_step or sys.maxsize
    recorder.begin(path)
    before_shutdown(lambda: recorder.end(path))
    atexit.register(recorder.end, path)


def _checked_path(path: str | os.PathLike[str], error: type[PSEngineError], name: str) -> Path:
    # Absolute: the program may change its folder before it ends.
    checked = Path(os.path.abspath(path))
    if checked.is_dir() or not os.access(checked.parent, os.W_OK):
        raise error(
            f"{name} writes to a file in an existing folder (expected to be able to write {checked}, got no such"
            " folder, no permission, or a folder of this name)."
        )
    return checked
