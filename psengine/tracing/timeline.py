"""Spans that a timeline shows, recorded on this rank while somebody wants them, and written for Chrome's trace viewer.

Recording is off unless ``psengine.timeline`` or ``PSENGINE_TIMELINE`` turned it on; a span site then costs one look at
``recorder.is_on``. Times are the host's clock, which all its processes share; hosts agree as far as NTP makes them.

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
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from psengine.environment.context import before_shutdown, world_place
from psengine.environment.variables import read_variable
from psengine.errors import ConfigurationError, EnvironmentVariableError, PSEngineError
from psengine.tracing.files import COMPUTE, find_parts, merge_parts, part_path, trace, write

if TYPE_CHECKING:
    from psengine.tracing.files import Event

logger = logging.getLogger(__name__)

now_ns = time.time_ns

# Of about 200 bytes each, five times that while the file is written: some thousand steps. Later ones are left out.
MAX_EVENTS = 200_000


class Recorder:
    """Collects spans of this process; there is one, ``recorder``.

    Attributes:
        is_on: whether anybody wants spans now.
        step: of the latest training forward, for spans that know no step of their own.
        most_events: how many spans are kept; later ones are counted in ``dropped``.
        worker_rank: this process's at its parameter servers; None for that in the default group.
        notes_waits: whether waits for collective operations leave spans; False while their caller records them.
        synchronizes: whether ``settled_ns`` waits for the accelerator.
        on_step: called with each training forward's iteration.
        process_id: of the process that PSENGINE_TIMELINE made record; 0 where none did.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.step = 0
        self.dropped = 0
        self.most_events = MAX_EVENTS
        self.worker_rank: int | None = None
        self.notes_waits = True
        self.synchronizes = False
        self.on_step: Callable[[int], None] | None = None
        self.process_id = 0
        self._events: list[Event] = []
        self._users = 0

    def settled_ns(self) -> int:
        """The time; where the recording ``synchronizes``, once the device has done what this thread's stream holds.

        On a GPU the host launches work and runs ahead. A wait that begins and ends at settled times is the device's:
        from the end of this rank's own work to the arrival of the result. Other streams, such as NCCL's, are not waited
        for: an exchange may still overlap with backward.
        """
        if self.synchronizes and torch.accelerator.is_available() and not torch.compiler.is_compiling():
            torch.accelerator.current_stream().synchronize()
        return now_ns()

    def begin(self) -> int:
        """Turn recording on for one more user; return the number of the user's first span."""
        if self._users == 0:
            self._events, self.dropped = [], 0
        self._users += 1
        self.is_on = True
        return len(self._events)

    def end(self) -> None:
        """Turn recording off for one user."""
        self._users -= 1
        self.is_on = self._users > 0

    def write_part(self, path: str | os.PathLike[str], first: int) -> None:
        """Write the spans from number ``first`` on as this rank's part of ``path``. An error is logged."""
        rank = world_place()[0] if self.worker_rank is None else self.worker_rank
        part = part_path(path, rank)
        try:
            write(trace(self._events[first:], rank=rank, dropped=self.dropped), part)
        except Exception as error:
            logger.warning("the timeline of rank %d could not be written: %s", rank, error)
        else:
            logger.info("timeline of rank %d written to %s", rank, part)

    def add(
        self,
        name: str,
        started_ns: int,
        *,
        step: int | None = None,
        args: Mapping[str, Any] | None = None,
        ended_ns: int | None = None,
        track: str = COMPUTE,
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
        if self.on_step is not None:
            self.on_step(iteration)


recorder = Recorder()


@contextmanager
def timeline(path: str | os.PathLike[str]) -> Iterator[None]:
    """Record what this rank does inside the block, and write it for https://ui.perfetto.dev or chrome://tracing.

    Every rank of the process group enters and leaves the block; rank 0 then merges the files of the ranks on its host.
    After an exception inside the block, and with workers over parameter servers, each rank writes its own
    ``path.rank<r>`` instead, without waiting; ``psengine.tracing.files.merge_parts`` joins those. docs/diagnosis.md
    lists the spans and their cost.

    Args:
        path: of the file, JSON; overwritten.

    Raises:
        ConfigurationError: there is no such folder.
    """
    path = _checked_path(path, ConfigurationError, "psengine.timeline")
    first = recorder.begin()
    try:
        yield
    except BaseException:
        recorder.end()
        recorder.write_part(path, first)
        raise
    recorder.end()
    recorder.write_part(path, first)
    if recorder.worker_rank is None:
        try:
            _merge_on_rank_0(path)
        except Exception as error:
            logger.warning("the ranks' timelines could not be merged (%s); each rank has its own", error)


def _merge_on_rank_0(path: Path) -> None:
    if dist.is_initialized():
        dist.barrier()
    rank, world_size = world_place()
    parts = [part for part in find_parts(path) if part in {part_path(path, other) for other in range(world_size)}]
    if rank == 0:
        merge_parts(parts, path)
        for part in parts:
            part.unlink()
        logger.info("timeline of %d ranks written to %s", len(parts), path)


# ---- PSENGINE_TIMELINE -------------------------------------------------------------------------------------------


def model_wrapped(worker_rank: int | None) -> None:
    """A model was wrapped, whose strategy gives this process ``worker_rank``: record where PSENGINE_TIMELINE says so.

    Raises:
        EnvironmentVariableError: PSENGINE_TIMELINE names no writable place, PSENGINE_TIMELINE_STEPS no number, or
            PSENGINE_TIMELINE_SYNCHRONIZE neither 0 nor 1.
    """
    recorder.worker_rank = worker_rank
    text = read_variable("PSENGINE_TIMELINE")
    process_id = os.getpid()
    if not text or recorder.process_id == process_id:
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
    first = recorder.begin()
    recorder.process_id, recorder.synchronizes = process_id, synchronize == "1"
    seen: set[int] = set()

    def write() -> None:
        # Not in a forked child, nor again where the steps are over.
        if os.getpid() == process_id and not (steps and len(seen) > int(steps)):
            recorder.write_part(path, first)

    def count(iteration: int) -> None:
        if len(seen | {iteration}) > int(steps or 0):
            write()
            recorder.on_step, recorder.synchronizes = None, False
            recorder.end()
        seen.add(iteration)

    recorder.on_step = count if steps else None
    before_shutdown(write)
    atexit.register(write)


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
