"""How a server survives its end: the snapshot it starts from, and the thread that writes them, one at a time.

A failure is logged and shown, and never ends the server: the older generation stays what it is durable to. While
nothing changes, nothing is written, whoever asks.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from psengine.errors import ProtocolError, SnapshotError
from psengine.parameter_server.server.core.capture import Meeting
from psengine.parameter_server.server.core.job_meta import merge_job_meta
from psengine.parameter_server.server.core.shard import Shard
from psengine.parameter_server.server.durability.wishes import MAX_WISHES, SnapshotWishes
from psengine.parameter_server.server.snapshots.store import JobState, SnapshotStore, distribute
from psengine.parameter_server.server.transport.shard_thread import ShardThread
from psengine.parameter_server.status_model import SnapshotStatus

logger = logging.getLogger(__name__)

# A shard copies everything it holds while it captures.
CAPTURE_DEADLINE_S = 60.0
# Steps that were under way get this long to come to all their chunks: nothing waits for it but the snapshot.
STEPS_DEADLINE_S = 10.0
# Connections that take all descriptors are cut within a second or two; see ``connections.py``.
DESCRIPTORS_DEADLINE_S = 5.0
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class SnapshotOutcome:
    """What came of a wish for a snapshot.

    Attributes:
        generation: what the server is durable to now; None where it is to nothing.
        error: why no new one was written; "" where one was.
        is_empty: there was nothing to write.
    """

    generation: int | None
    error: str = ""
    is_empty: bool = False


@dataclass(frozen=True, slots=True)
class Restored:
    """What a start found.

    Attributes:
        generation: what was taken over; None where there was none.
        summary: how durable the server is, for people.
        notes: newer generations that were skipped, and why.
    """

    generation: int | None
    summary: str
    notes: list[str]


def _without_unfinished(stored: Sequence[list[JobState]]) -> list[list[JobState]]:
    """Leave out jobs that were being registered when the snapshot was taken: some shards had their part already."""
    complete = set.intersection(*({job.name for job in jobs} for jobs in stored)) if stored else set()
    return [[job for job in jobs if job.name in complete] for jobs in stored]


def _check_memory(shards: Sequence[Shard], parts: Sequence[list[JobState]], generation: str) -> None:
    for shard, jobs in zip(shards, parts, strict=True):
        # Backups of weights are not counted: workers' pulls make them without asking, so that a server may hold more
        # than its limit allows, and what it wrote then it must be able to start from.
        needed_bytes = sum(
            tensor.nbytes
            for job in jobs
            for chunk in job.chunks
            for name, tensor in chunk.tensors.items()
            if not name.startswith("backup/")
        )
        if needed_bytes > shard.settings.max_memory_bytes:
            raise SnapshotError(
                f"{generation} does not fit --max-memory-bytes (expected at most {shard.settings.max_memory_bytes}"
                f" bytes at shard {shard.index}, its share, got {needed_bytes}). Raise it, or start with an empty"
                " --snapshot-dir."
            )


def restore(store: SnapshotStore, shards: Sequence[Shard]) -> Restored:
    """Have ``shards``, which are empty and whose threads have not started, take over the newest intact generation.

    Raises:
        SnapshotError: there are generations and none can be read, or it does not fit these shards or their memory.
    """
    loaded = store.load()
    if loaded is None:
        return Restored(None, f"durable to {store.directory}, no generation yet", [])
    generation = f"Generation {loaded.generation} in {store.directory}"
    try:
        parts = distribute(_without_unfinished(loaded.shards), len(shards), merge_job_meta)
        _check_memory(shards, parts, generation)
        for shard, jobs in zip(shards, parts, strict=True):
            shard.restore(jobs, time.monotonic())
            shard.durable.note(loaded.generation)
    except (ProtocolError, LookupError, TypeError, ValueError) as error:
        raise SnapshotError(
            f"{generation} cannot be taken over (expected one of this version of psengine, got: {error!r})."
        ) from error
    versions: dict[str, int] = {}
    for shard in shards:
        for name, job in shard.status(time.monotonic()).jobs.items():
            versions[name] = max(versions.get(name, 0), job.version_max)
    shown = ", ".join(f"{name} version {version}" for name, version in versions.items()) or "no job"
    summary = f"durable to {store.directory}, generation {loaded.generation} ({shown})"
    return Restored(loaded.generation, summary, loaded.notes)


class SnapshotThread(threading.Thread):
    """Writes generations of what all shards hold.

    Args:
        store: open; used by this thread alone from its start on.
        threads: the shards, started.
        interval_s: seconds between snapshots, of which those that would change nothing are left out; 0: only on wish.
        generation: what the server is durable to at the start.
    """

    def __init__(
        self, store: SnapshotStore, threads: Sequence[ShardThread], interval_s: float, generation: int | None
    ) -> None:
        super().__init__(name="psengine-snapshots", daemon=True)
        self.store = store
        self.generation = generation
        self.failures = 0
        self.last_error = ""
        self.last_seconds = 0.0
        self._threads = threads
        self._interval_s = interval_s
        # When ``generation`` was last known to be all that the shards hold.
        self._current_s: float | None = None
        self._wishes: SnapshotWishes[Callable[[SnapshotOutcome], None]] = SnapshotWishes()

    def request(self, done: Callable[[SnapshotOutcome], None], *, is_ours: bool = False) -> None:
        """Make durable what is there now, or later.

        Args:
            done: called in this thread; at once where too many ask.
            is_ours: see ``SnapshotWishes.add``.
        """
        if not self._wishes.add(done, is_ours=is_ours):
            text = f"the server ends, or too many wait for a snapshot (expected at most {MAX_WISHES}); ask again later"
            done(SnapshotOutcome(self.generation, text))

    def begin(self) -> Future[SnapshotOutcome]:
        """``request``, to be waited for."""
        written: Future[SnapshotOutcome] = Future()
        self.request(written.set_result, is_ours=True)
        return written

    def end(self) -> None:
        """Write one more snapshot if one was wished for, then end; join afterwards."""
        self._wishes.end()

    def status(self) -> SnapshotStatus:
        """How far it is."""
        return SnapshotStatus(
            directory=str(self.store.directory),
            interval_s=self._interval_s,
            generation=self.generation,
            age_s=None if self._current_s is None else round(time.monotonic() - self._current_s, 3),
            last_seconds=round(self.last_seconds, 3),
            failures=self.failures,
            last_error=self.last_error,
        )

    def run(self) -> None:
        """The loop."""
        due_s = time.monotonic() + self._interval_s
        while True:
            wishes = self._wishes.take(max(0.0, due_s - time.monotonic()) if self._interval_s else None)
            if wishes is None:
                return
            outcome = SnapshotOutcome(self.generation) if self._is_current() else self.write()
            if not wishes:
                due_s = time.monotonic() + self._interval_s
            for done in wishes:
                try:
                    done(outcome)
                except Exception:
                    logger.exception("nobody could be told that a snapshot is done")

    def _is_current(self) -> bool:
        """Whether the newest generation is still there, and nothing has changed since it was captured."""
        asked_s = time.monotonic()
        try:
            futures = [thread.ask(thread.shard.durable.has_changed) for thread in self._threads]
            if any(future.result(CAPTURE_DEADLINE_S) for future in futures):
                return False
            if self.generation is None or self.store.newest != self.generation:
                return False
        except Exception:
            return False  # to write one fails likewise, and tells
        self._current_s = asked_s
        return True

    def write(self) -> SnapshotOutcome:
        """Capture and write one generation; call it in this thread, or once this thread has ended."""
        started_s = time.monotonic()
        try:
            shards = self._capture()
            # Where there are generations, an empty one tells that their jobs are gone.
            if self.generation is None and not any(shards):
                return SnapshotOutcome(self.generation, "there is no job with values yet", is_empty=True)
            generation = self._save(shards)
        except Exception as error:
            self.failures += 1
            self.last_error = str(error) or repr(error)
            self._look_what_is_left()
            logger.error(
                "no snapshot was written, the server stays durable to %s: %s",
                "nothing" if self.generation is None else f"generation {self.generation}",
                self.last_error,
                exc_info=not isinstance(error, SnapshotError),
            )
            return SnapshotOutcome(self.generation, self.last_error)
        self.generation, self.last_error = generation, ""
        self._current_s = started_s
        self.last_seconds = time.monotonic() - started_s
        for thread in self._threads:
            thread.ask(partial(thread.shard.durable.note, generation))
        logger.info("durable to %s, generation %d, after %.2f s", self.store.directory, generation, self.last_seconds)
        return SnapshotOutcome(generation)

    def _capture(self) -> list[list[JobState]]:
        """What all shards hold, cut between workers' steps; see ``capture.py``."""
        meeting = Meeting(len(self._threads))
        futures = [thread.ask(partial(thread.shard.meet_and_capture, meeting)) for thread in self._threads]
        captures = [future.result(CAPTURE_DEADLINE_S) for future in futures]
        last_s = time.monotonic() + STEPS_DEADLINE_S
        shards: list[list[JobState]] = []
        for thread, capture in zip(self._threads, captures, strict=True):
            while not capture.states.done() and time.monotonic() < last_s and not thread.drained.is_set():
                time.sleep(_LOOK_S)
            torn = [] if capture.states.done() else thread.ask(capture.end).result(CAPTURE_DEADLINE_S)
            if torn and not thread.drained.is_set():
                text = f"a snapshot has {', '.join(torn)} in some chunks only: the others did not come"
                logger.warning("shard %d: %s within %g s", thread.shard.index, text, STEPS_DEADLINE_S)
                thread.shard.note("torn", text)
            shards.append(capture.states.result())
        return shards

    def _save(self, shards: Sequence[list[JobState]]) -> int:
        """``SnapshotStore.save``; while the process has no descriptor left, until it has."""
        last_s = time.monotonic() + DESCRIPTORS_DEADLINE_S
        while True:
            try:
                return self.store.save(shards)
            except SnapshotError as error:
                cause = error.__cause__
                is_short = isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE)
                if not is_short or time.monotonic() >= last_s:
                    raise
            time.sleep(_LOOK_S)

    def _look_what_is_left(self) -> None:
        """Somebody may have removed what the server was durable to. What cannot be seen now is as it was."""
        try:
            newest = self.store.newest
        except OSError:
            return
        if newest == self.generation:
            return
        self.generation = newest
        for thread in self._threads:
            thread.ask(partial(thread.shard.durable.note, None))
