"""What a server keeps through its end, as its operator chose: nothing, snapshots, or everything that it acknowledged.

memory      nothing
snapshot    generations of snapshots; what was acknowledged after the newest one is lost
log         the same, and a log of every update: an update is acknowledged once it is on the disk
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from psengine.errors import SnapshotError
from psengine.parameter_server.server.coordinator.coordinators import Coordinators
from psengine.parameter_server.server.durability.log_thread import LogThread
from psengine.parameter_server.server.durability.restoring import Recovered, place_into, recover
from psengine.parameter_server.server.log.log import LogStart, Place
from psengine.parameter_server.server.log.reading import WITHOUT_LOG
from psengine.parameter_server.server.shard.shard import Shard
from psengine.parameter_server.server.snapshots.files import JobState, ServerState
from psengine.parameter_server.server.snapshots.generations import SnapshotStore
from psengine.parameter_server.server.transport.shard_thread import ShardThread
from psengine.parameter_server.status_model import LogStatus, SnapshotStatus

logger = logging.getLogger(__name__)

# How long the first file of a log may take to be there.
START_S = 5.0
# A shard copies everything it holds while it captures; its log writes what was under way, and a file's beginning.
CAPTURE_DEADLINE_S = 60.0
# Of the room that a log leaves for a snapshot: what describes the chunks.
_SLACK_BYTES = 1 << 20


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
    """Writes generations of what all shards hold, one at a time.

    ::

        wish ─┐                    ┌─► wishes that came meanwhile ─► the next snapshot ─► one outcome for all of them
        wish ─┴─► a snapshot ──────┘

        shard's thread   cut the log ─ copy the state, at that record
        log thread            └─► the new segment is on the disk ─┐
        this thread                                                └─► the generation is written, older files go

    At most one snapshot is written and one waits, however many ask; the snapshot that answers a wish began after it.
    While nothing changes, nothing is written. A failure is logged and shown, and never ends the server: it stays
    durable to the older generation.

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
        logger.info("durable to %s, generation %d, after %.2f s", self.store.directory, generation, self.last_seconds)
        self._note("snapshot", f"generation {generation} is written")
        return SnapshotOutcome(generation)

    def _capture(self, deadline_s: float) -> ServerState:
        """What all shards hold, each at the record at which its log is cut."""
        logs: Sequence[LogThread | None] = self._logs or [None] * len(self._threads)
        asked = [thread.ask(partial(_cut, thread, log)) for thread, log in zip(self._threads, logs, strict=True)]
        cuts = [one.result(deadline_s) for one in asked]
        state = ServerState([states for states, _, _ in cuts], coordinators=cuts[0][1])
        for index, (log, (_, _, place)) in enumerate(zip(logs, cuts, strict=True)):
            if log is not None and place is not None:
                log.await_begun(place.segment, deadline_s)
                state.places[index] = place
        return state

    def _find_newest(self) -> None:
        """Somebody may have removed the generation that the server was durable to; where that is not seen, it stays."""
        try:
            newest = self.store.newest
        except OSError:
            return
        self.generation = newest


def _cut(thread: ShardThread, log: LogThread | None) -> tuple[list[JobState], Any, Place | None]:
    """In the shard's thread: the state, what its coordinators know, and where its log goes on from it."""
    coordinators = None if thread.coordinators is None else thread.coordinators.to_meta()
    return thread.shard.capture(), coordinators, None if log is None else log.cut()


class Durability:
    """Of one server process with a directory; ``restore``, then ``start``, then ``end``.

    Args:
        stack: closes the store.
        keeps_log: whether the tier is "log".
        interval_s: see ``SnapshotThread``.
        note: takes an event's kind and text.

    Raises:
        SnapshotError: the directory cannot be had.
    """

    def __init__(
        self, directory: Path, stack: ExitStack, *, keeps_log: bool, interval_s: float, note: Callable[[str, str], None]
    ) -> None:
        self._store = stack.enter_context(SnapshotStore(directory))
        self._keeps_log = keeps_log
        self._interval_s = interval_s
        self._note = note
        self._recovered = Recovered()
        self.logs: list[LogThread] = []
        self.snapshots: SnapshotThread

    def restore(self, shards: Sequence[Shard], coordinators: Coordinators) -> str:
        """Restore what is durable, before the first message; how durable the server is, for people.

        Raises:
            SnapshotError: there is something, and it cannot be taken over.
        """
        store = self._store
        try:
            self._recovered = recovered = recover(store)
            for name in recovered.headless:
                store.disk.delete(name)
        except OSError as error:
            raise SnapshotError(f"{error.filename} cannot be read: {error.strerror}") from error
        for text in recovered.notes:
            logger.warning("left out: %s", text)
        if recovered.notes:
            self._note("snapshot_failed", f"left out: {'; '.join(recovered.notes)}")
        number, records = recovered.generation, sum(recovered.records)
        if number is None and not records:
            return f"durable to {store.disk}, no generation yet"
        place_into(recovered, shards, f"Generation {number or 0} in {store.disk}")
        for meta in recovered.coordinators:
            if meta is not None:
                coordinators.restore(meta, time.monotonic())
        versions = {name: max(of_chunks, default=0) for name, of_chunks in recovered.versions().items()}
        shown = ", ".join(f"{name} version {version}" for name, version in versions.items()) or "no job"
        summary = f"durable to {store.disk}, {'no generation' if number is None else f'generation {number}'}"
        summary += f" and {records} records of the log ({shown})" if records else f" ({shown})"
        self._note("restored", f"taken over: {summary}")
        return summary

    def start(self, threads: Sequence[ShardThread], epoch: int) -> None:
        """Write logs and snapshots of these shards, whose threads have not started.

        Raises:
            SnapshotError: a log, or the generation that it goes on from, could not be written.
        """
        recovered, store = self._recovered, self._store
        for thread in threads if self._keeps_log else ():
            segment, first, before = recovered.ends.get(thread.shard.index, (1, 0, 0))
            start = LogStart(thread.shard.index, segment, first, epoch, before)
            memory_bytes = thread.shard.memory_bytes
            wanted = self._note, lambda: self.snapshots.begin(), memory_bytes, self._reserved_bytes
            self.logs.append(LogThread(store.disk, start, thread.answers, *wanted))
        has_all = None if any(recovered.records) else recovered.generation
        self.snapshots = SnapshotThread(store, threads, self.logs, self._interval_s, has_all, self._note)
        for log in self.logs:
            log.start()
        if self.logs or any(recovered.records):
            # What was read may not be durable yet, because the last life may have died before its fsync: this life goes
            # on from a generation of its own, which also has as many shards as there are.
            self._write_first(threads)
        for thread, log in zip(threads, self.logs, strict=False):
            thread.answers.log, thread.shard.append = log.log, log.append
        if self.logs:
            threads[0].append_coordinator = self.logs[0].append_coordinator
        self._recovered = Recovered()
        self.snapshots.start()

    def _write_first(self, threads: Sequence[ShardThread]) -> None:
        outcome = self.snapshots.write(START_S)
        if outcome.error and not outcome.is_empty:
            self.end_logs()
            needed_bytes = _SLACK_BYTES + sum(thread.shard.memory_bytes() for thread in threads)
            raise SnapshotError(
                f"{outcome.error}. A start writes a generation and begins a log (expected room for {needed_bytes}"
                f" bytes in {self._store.disk}, got {self._store.disk.free_bytes()}). Fix: delete other files on that"
                " disk, or make it larger"
            )
        if WITHOUT_LOG in self._store.disk.list():
            self._store.disk.delete(WITHOUT_LOG)

    def _reserved_bytes(self) -> int:
        """Room that logs leave for the next generation."""
        return _SLACK_BYTES + max(self._store.needed_bytes, sum(log.needed_bytes for log in self.logs))

    def status(self) -> tuple[LogStatus, ...]:
        """Of the logs."""
        return tuple(log.status() for log in self.logs)

    def end_snapshots(self) -> None:
        """End their thread, before the shards' threads end."""
        self.snapshots.end()
        self.snapshots.join(timeout=5.0)

    def end_logs(self) -> None:
        """End theirs, after the shards' threads."""
        for log in self.logs:
            log.end()
        for log in self.logs:
            log.join(timeout=5.0)
