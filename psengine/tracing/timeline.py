"""Spans that a timeline shows, recorded on this rank while somebody wants them.

Recording is off unless ``psengine.timeline`` or ``PSENGINE_TIMELINE`` turned it on; a span site then costs one look at
``recorder.is_on``. Times are CLOCK_MONOTONIC, which all processes of a host share; tracing/clocks.py compares hosts.

A site, as it stands in the hot paths::

    started_ns = now_ns() if recorder.is_on else 0
    ...
    if started_ns:
        recorder.add("pack", started_ns, step=..., args=bucket.facts)

docs/diagnosis.md has the names of the spans and how to read them.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from psengine.environment.context import before_shutdown, world_place
from psengine.environment.variables import read_variable
from psengine.errors import ConfigurationError, EnvironmentVariableError, PSEngineError
from psengine.tracing import files as timeline_files
from psengine.tracing.clocks import Offset
from psengine.tracing.overlap import describe

if TYPE_CHECKING:
    from psengine.tracing.files import Event

logger = logging.getLogger(__name__)

# CLOCK_MONOTONIC on Linux.
now_ns = time.monotonic_ns

# Of about 200 bytes each, five times that while the file is written: some thousand steps. Later ones are left out.
MAX_EVENTS = 200_000


class Group(Protocol):
    """The ranks that record together: ``collectives.timeline_group.TimelineGroup``."""

    rank: int
    world_size: int

    def measure_offset(self) -> Offset | None:
        """Compare this rank's clock with rank 0's; None where all ranks share a host. All ranks call it."""

    def gather(self, payload: bytes) -> list[bytes]:
        """Return every rank's ``payload`` on rank 0, nothing on others. All ranks call it."""


class Recorder:
    """Collects spans of this process; there is one, ``recorder``.

    Attributes:
        is_on: whether anybody wants spans now.
        step: of the latest training forward, for spans that know no step of their own.
        most_events: how many spans are kept; later ones are counted in ``dropped``.
        device: type of the device of the first wrapped model, such as "cpu".
        notes_waits: whether waits for collective operations leave spans; False while their caller records them.
        synchronizes: whether ``settled_ns`` waits for the device.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.step = 0
        self.dropped = 0
        self.most_events = MAX_EVENTS
        self.device: str | None = None
        self.notes_waits = True
        self.synchronizes = False
        self._events: list[Event] = []
        self._users = 0
        self._on_step: Callable[[int], None] | None = None
        self._rank: int | None = None
        self._is_alone = True
        self._find_group: Callable[[], Group | None] = lambda: None

    def attach(self, rank: int, device: str, find_group: Callable[[], Group | None], *, is_alone: bool) -> None:
        """A model was wrapped. The first that lives counts: a later one may be a copy that this rank alone has made.

        Args:
            rank: this process's, in the job.
            device: the type of the model's.
            find_group: returns the job's ranks, where the model's replicas are all of them.
            is_alone: the job has one process.
        """
        self.device = self.device or device
        if self.group is None:
            self._rank = rank
            self._is_alone = is_alone
            self._find_group = find_group

    @property
    def rank(self) -> int:
        """The rank of this process in the job."""
        return world_place()[0] if self._rank is None else self._rank

    @property
    def is_alone(self) -> bool:
        """Whether no other process can be recording the same program."""
        return self._is_alone and world_place()[1] == 1

    @property
    def group(self) -> Group | None:
        """The ranks of the wrapped model while it lives; None where those are not all of the job's."""
        return self._find_group()

    def settled_ns(self) -> int:
        """The time; where the recording ``synchronizes``, once the device has done what this thread's stream holds.

        On a GPU the host launches work and runs ahead. A wait that begins and ends at settled times is the device's:
        from the end of this rank's own work to the arrival of the result. Other streams, such as NCCL's, are not waited
        for: an exchange may still overlap with backward.
        """
        if self.synchronizes and self.device not in (None, "cpu") and not torch.compiler.is_compiling():
            synchronize_stream()
        return now_ns()

    def begin(self) -> int:
        """Turn recording on for one more user; return the number of the user's first span."""
        if self._users == 0:
            self._events, self.dropped = [], 0
        self._users += 1
        self.is_on = True
        return len(self._events)

    def end(self, first: int) -> list[Event]:
        """Turn recording off for one user; return the spans from number ``first`` on, in the order they ended."""
        self._users -= 1
        if self._users == 0:
            self.is_on = False
        return self.since(first)

    def since(self, first: int) -> list[Event]:
        """The spans from number ``first`` on."""
        return self._events[first:]

    def add(
        self,
        name: str,
        started_ns: int,
        *,
        step: int | None = None,
        args: Mapping[str, Any] | None = None,
        ended_ns: int | None = None,
        track: str = timeline_files.COMPUTE,
        category: str | None = None,
    ) -> None:
        """A span ended, now unless ``ended_ns`` says when.

        Args:
            name: what it is; see docs/diagnosis.md.
            started_ns: ``now_ns()`` at its start.
            step: the model's iteration; None: the latest.
            args: facts to show; not copied.
            ended_ns: ``now_ns()`` at its end.
            track: "compute" for the host's own time, "exchange" for work elsewhere.
            category: None takes the name.
        """
        if not self.is_on:
            return  # it ended meanwhile
        if len(self._events) >= self.most_events:
            if self.dropped == 0:
                logger.warning("the timeline is full after %d spans; later ones are left out", self.most_events)
            self.dropped += 1
            return
        ended_ns = now_ns() if ended_ns is None else ended_ns
        step = self.step if step is None else step
        self._events.append((name, category or name, track, started_ns, ended_ns, step, args))

    @contextmanager
    def span(self, name: str, **args: Any) -> Iterator[None]:
        """Record the block; for code that is not hot."""
        started_ns = now_ns() if self.is_on else 0
        try:
            yield
        finally:
            if started_ns:
                self.add(name, started_ns, args=args)

    def begin_step(self, iteration: int) -> None:
        """A training forward begins, the ``iteration``-th of its model."""
        self.step = iteration
        if self._on_step is not None:
            self._on_step(iteration)


def synchronize_stream() -> None:
    """Wait for the work of this thread's stream on the accelerator."""
    torch.accelerator.current_stream().synchronize()


recorder = Recorder()


@dataclass
class _Recording:
    """The spans of one file.

    Attributes:
        path: of the file; parts are called ``path.rank<r>``.
        first: number of its first span.
        offset: this host's clock against rank 0's, where it was measured.
        anchor_ns: the wall clock minus the monotonic one, when recording began.
    """

    path: Path
    first: int = field(default_factory=recorder.begin)
    offset: Offset | None = None
    anchor_ns: int = field(default_factory=lambda: time.time_ns() - now_ns())

    def compare_clocks(self) -> None:
        """Measure ``offset``; where ranks record together, all call it."""
        if recorder.group is not None:
            self.offset = recorder.group.measure_offset()

    def describe(self, events: list[Event]) -> dict[str, Any]:
        """The trace of this rank alone."""
        return timeline_files.trace(
            events,
            rank=recorder.rank,
            process_id=os.getpid(),
            host=socket.gethostname(),
            anchor_ns=self.anchor_ns,
            offset=self.offset,
            dropped=recorder.dropped,
            device=recorder.device,
            is_synchronized=recorder.synchronizes,
        )

    def write_part(self, events: list[Event]) -> Path:
        """Write this rank's own file and return its path."""
        path = timeline_files.part_path(self.path, recorder.rank)
        timeline_files.write(self.describe(events), path)
        return path


@contextmanager
def timeline(path: str | os.PathLike[str]) -> Iterator[None]:
    """Record what this rank does inside the block, and write it for https://ui.perfetto.dev or chrome://tracing.

    Every rank of the process group enters and leaves the block; rank 0 then writes one file with all of them. After an
    exception inside the block, without a process group, and where a model's replicas are only some of the ranks (a
    ``device_mesh`` of several dimensions), each rank writes its own ``path.rank<r>`` instead, without waiting;
    ``psengine.tracing.files.merge_parts`` joins those. docs/diagnosis.md lists the spans and their cost.

    Args:
        path: of the file, JSON; overwritten.

    Raises:
        ConfigurationError: there is no such folder.
    """
    recording = _Recording(_checked_path(path, ConfigurationError, "psengine.timeline"))
    has_ended = False
    try:
        recording.compare_clocks()
        yield
        events = recorder.end(recording.first)
        has_ended = True
        try:
            _write_together(recording, events)
        except Exception as error:
            logger.warning("the ranks' timelines could not be gathered and written (%s); each writes its own", error)
            _write_alone(recording, events)
    finally:
        if not has_ended:
            _write_alone(recording, recorder.end(recording.first))


def _write_together(recording: _Recording, events: list[Event]) -> None:
    group = recorder.group
    if group is None:
        if recorder.is_alone:
            timeline_files.write(timeline_files.merge([recording.describe(events)]), recording.path)
        else:
            logger.info("timeline written to %s", recording.write_part(events))
        return
    parts = group.gather(timeline_files.encode(recording.describe(events)))
    if group.rank == 0:
        merged = timeline_files.merge([timeline_files.decode(part) for part in parts])
        timeline_files.write(merged, recording.path)
        logger.info("timeline of %d ranks written to %s%s", group.world_size, recording.path, describe(merged))


def _write_alone(recording: _Recording, events: list[Event]) -> None:
    """Write this rank's part; an error is logged, and does not end the program."""
    try:
        path = recording.write_part(events)
    except Exception as error:
        logger.warning("the timeline of rank %d could not be written: %s", recorder.rank, error)
    else:
        logger.info("timeline of rank %d written to %s", recorder.rank, path)


# ---- PSENGINE_TIMELINE -------------------------------------------------------------------------------------------

_from_environment: _FromEnvironment | None = None


class _FromEnvironment:
    """The recording that PSENGINE_TIMELINE asks for: this rank's part, written at the end or after some steps."""

    def __init__(self, recording: _Recording, steps: int | None) -> None:
        self._recording = recording
        self._steps = steps
        self._first_step: int | None = None
        self._is_over = False
        self._process_id = os.getpid()
        if steps is not None:
            recorder._on_step = self._count
        before_shutdown(self.write)
        atexit.register(self.write)

    def _count(self, iteration: int) -> None:
        if self._first_step is None or iteration < self._first_step:
            self._first_step = iteration
        if self._steps is not None and iteration - self._first_step >= self._steps:
            recorder._on_step = None
            self.write()
            self._is_over = True
            recorder.end(self._recording.first)
            recorder.synchronizes = False

    def write(self) -> None:
        """Write the spans so far; a later call overwrites the file."""
        if not self._is_over and self._process_id == os.getpid():
            _write_alone(self._recording, recorder.since(self._recording.first))


def start_from_environment() -> None:
    """Begin to record where PSENGINE_TIMELINE says so; called after ``attach``, when a model was wrapped.

    Raises:
        EnvironmentVariableError: PSENGINE_TIMELINE names no writable place, PSENGINE_TIMELINE_STEPS no number, or
            PSENGINE_TIMELINE_SYNCHRONIZE neither 0 nor 1.
    """
    global _from_environment
    text = read_variable("PSENGINE_TIMELINE")
    if not text or (_from_environment is not None and _from_environment._process_id == os.getpid()):
        return
    path = _checked_path(text, EnvironmentVariableError, "PSENGINE_TIMELINE")
    steps = read_variable("PSENGINE_TIMELINE_STEPS")
    if steps and not (steps.isascii() and steps.isdecimal() and int(steps) > 0):
        raise EnvironmentVariableError(
            f"PSENGINE_TIMELINE_STEPS is how many steps to record (expected 1 or more, got {steps!r}). Fix: leave it"
            " out to record until the program ends."
        )
    synchronize = read_variable("PSENGINE_TIMELINE_SYNCHRONIZE") or "0"
    if synchronize not in ("0", "1"):
        raise EnvironmentVariableError(
            "PSENGINE_TIMELINE_SYNCHRONIZE says whether forwards and waits are timed when the device has done its work"
            f" (expected 0 or 1, got {synchronize!r})."
        )
    recorder.synchronizes = synchronize == "1"
    recording = _Recording(path)
    recording.compare_clocks()
    _from_environment = _FromEnvironment(recording, int(steps) if steps else None)


def _checked_path(path: str | os.PathLike[str], error: type[PSEngineError], name: str) -> Path:
    # Absolute: the program may change its folder before it ends.
    checked = Path(os.path.abspath(path))
    if not checked.parent.is_dir():
        raise error(f"{name} writes to a file in an existing folder (expected {checked.parent} to exist, got none).")
    if checked.is_dir() or not os.access(checked.parent, os.W_OK):
        raise error(f"{name} writes to a file (expected to be able to write {checked}, got a folder or no permission).")
    return checked


# ---- collective operations ---------------------------------------------------------------------------------------


def record_wait(what: str, started_ns: int) -> None:
    """A wait for the collective operation ``what`` is over."""
    if recorder.notes_waits:
        recorder.add(what, started_ns, ended_ns=recorder.settled_ns(), category="collective")


# Whether torch's profiler runs.
is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled


def profiled(what: str) -> torch.autograd.profiler.record_function:
    """Let torch's profiler show an operation in shared memory, such as "all-reduce of gradient bucket 3 (...)", as
    "psengine:all_reduce" with the rest as its argument.
    """
    verb, _, rest = what.partition(" of ")
    return torch.autograd.profiler.record_function(f"psengine:{verb.replace('-', '_').replace(' ', '_')}", rest)
