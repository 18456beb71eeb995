"""The thread that writes a server's snapshots, one at a time.

    wish ─┐                    ┌─► wishes that came meanwhile ─► the next snapshot ─► one outcome for all of them
    wish ─┴─► a snapshot ──────┘

    shard's thread   cut the log ─ copy the state, at that record
    log thread            └─► the new segment is on the disk ─┐
    this thread                                                └─► the generation is written, older files go

At most one snapshot is written and one waits, however many ask; the snapshot that answers a wish began after it. While
nothing changes, nothing is written. A failure is logged and shown, and never ends the server: it stays durable to the
older generation.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from psengine.errors import SnapshotError
from psengine.parameter_server.server.durability.log_thread import LogThread
from psengine.parameter_server.server.log.log import Place
from psengine.parameter_server.server.snapshots.files import JobState, ServerState
from psengine.parameter_server.server.snapshots.store import SnapshotStore
from psengine.parameter_server.server.transport.shard_thread import ShardThread
from psengine.parameter_server.status_model import SnapshotStatus

logger = logging.getLogger(__name__)

# A shard copies everything it holds while it captures; its log writes what was under way, and a file's beginning.
CAPTURE_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class SnapshotOutcome:
    """How a wish for a snapshot ended.

    Attributes:
        generation: the one that the server is durable to now; None without one.
        error: why no new one was written; "" where one was.
        is_empty: there was nothing to write.
    """

    generation: int | None
    error: str = ""
    is_empty: bool = False


class SnapshotThread(threading.Thread):
    """Writes generations of what all shards hold.

    Args:
        store: open; used by this thread alone from its start on.
        threads: the shards.
        logs: theirs, one for each; none where the server writes none.
        interval_s: seconds between snapshots; one that would change nothing is not written. 0: only on wish.
        generation: the one that has all that the shards hold; None without one.
        note: takes an event's kind and text.
    """

    def __init__(
        self,
        store: SnapshotStore,
        threads: Sequence[ShardThread],
        logs: Sequence[LogThread],
        interval_s: float,
        generation: int | None,
        note: Callable[[str, str], None],
    ) -> None:
        super().__init__(name="psengine-snapshots", daemon=True)
        self.store = store
        self.generation = generation
        self.failures = 0
        self.last_error = ""
        self.last_seconds = 0.0
        self._threads, self._logs = threads, logs
        self._interval_s = interval_s
        self._note = note
        self._durable_changes = None if generation is None else self._changes()
        # When ``generation`` was last known to be all that the shards hold.
        self._current_s: float | None = None
        self._changed = threading.Condition()
        self._wish: Future[SnapshotOutcome] | None = None  # of all for whom no snapshot has been begun
        self._has_ended = False

    def begin(self) -> Future[SnapshotOutcome]:
        """Make durable what is there now, or later. Callable from any thread."""
        with self._changed:
            if self._has_ended:
                refused: Future[SnapshotOutcome] = Future()
                refused.set_result(SnapshotOutcome(self.generation, "the server ends"))
                return refused
            self._wish = self._wish or Future()
            self._changed.notify()
            return self._wish

    def end(self) -> None:
        """Write one more snapshot if one was wished for, then end; join afterwards."""
        with self._changed:
            self._has_ended = True
            self._changed.notify()

    def status(self) -> SnapshotStatus:
        """The newest generation, its age, and the failures."""
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
            with self._changed:
                timeout_s = max(0.0, due_s - time.monotonic()) if self._interval_s else None
                self._changed.wait_for(lambda: self._wish or self._has_ended, timeout_s)
                wish, self._wish = self._wish, None
                if self._has_ended and wish is None:
                    return
            outcome = SnapshotOutcome(self.generation) if self._is_current() else self.write()
            if wish is None:
                due_s = time.monotonic() + self._interval_s
            else:
                wish.set_result(outcome)

    def _changes(self) -> int:
        return sum(thread.changes for thread in self._threads)

    def _is_current(self) -> bool:
        """Whether the newest generation is still there, and nothing has changed since it was captured."""
        asked_s = time.monotonic()
        try:
            is_there = self.generation is not None and self.store.newest == self.generation
        except OSError:
            return False  # ``write`` fails likewise, and reports it
        if not is_there or self._changes() != self._durable_changes:
            return False
        self._current_s = asked_s
        return True

    def write(self, deadline_s: float = CAPTURE_DEADLINE_S) -> SnapshotOutcome:
        """Capture and write one generation; call it in this thread, or before this thread and the shards' start.

        Args:
            deadline_s: how long shards, and then their logs, may take.
        """
        started_s, changes = time.monotonic(), self._changes()
        try:
            state = self._capture(deadline_s)
            # Where there are generations, an empty one tells that their jobs are gone.
            if self.generation is None and not self._logs and not any(state.shards):
                return SnapshotOutcome(self.generation, "there is no job with values yet", is_empty=True)
            generation = self.store.save(state)
        except Exception as error:
            self.failures += 1
            self.last_error = str(error) or repr(error)
            self._find_newest()
            logger.error(
                "no snapshot was written, the server stays durable to %s: %s",
                "nothing" if self.generation is None else f"generation {self.generation}",
                self.last_error,
                exc_info=not isinstance(error, SnapshotError),
            )
            self._note("snapshot_failed", f"a snapshot was not written: {self.last_error}")
            return SnapshotOutcome(self.generation, self.last_error)
        self.generation, self.last_error = generation, ""
        self._current_s, self._durable_changes = started_s, changes
        self.last_seconds = time.monotonic() - started_s
        self._tell_shards(generation)
        logger.info("durable to %s, generation %d, after %.2f s", self.store.directory, generation, self.last_seconds)
        self._note("snapshot", f"generation {generation} is written")
        return SnapshotOutcome(generation)

    def _capture(self, deadline_s: float) -> ServerState:
        """What all shards hold, each at the record at which its log is cut."""
        logs: Sequence[LogThread | None] = self._logs or [None] * len(self._threads)
        asked = [_ask(thread, partial(_cut, thread, log)) for thread, log in zip(self._threads, logs, strict=True)]
        cuts = [one.result(deadline_s) for one in asked]
        state = ServerState([cut.states for cut in cuts], coordinators=cuts[0].coordinators)
        for thread, log, cut in zip(self._threads, logs, cuts, strict=True):
            if log is not None and cut.place is not None:
                log.await_begun(cut.place.segment, deadline_s)
                state.places[thread.shard.index] = cut.place
        return state

    def _find_newest(self) -> None:
        """Somebody may have removed the generation that the server was durable to; where that is not seen, it stays."""
        try:
            newest = self.store.newest
        except OSError:
            return
        if newest != self.generation:
            self.generation = newest
            self._tell_shards(None)

    def _tell_shards(self, generation: int | None) -> None:
        for thread in self._threads:
            thread.ask(partial(thread.shard.note_durable, generation))


class _Cut(NamedTuple):
    """A shard's part of a snapshot."""

    states: list[JobState]
    coordinators: Any
    place: Place | None


def _cut(thread: ShardThread, log: LogThread | None) -> _Cut:
    """In the shard's thread: the state, and where its log goes on from it."""
    coordinators = None if thread.coordinators is None else thread.coordinators.to_meta()
    return _Cut(thread.shard.capture(), coordinators, None if log is None else log.cut())


def _ask(thread: ShardThread, function: Callable[[], _Cut]) -> Future[_Cut]:
    """Call it in the shard's thread; here, where that has not started."""
    if thread.ident is not None:
        return thread.ask(function)
    future: Future[_Cut] = Future()
    future.set_result(function())
    return future
