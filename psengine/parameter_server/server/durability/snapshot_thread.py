"""The thread that writes a server's snapshots, one at a time.

    wish ─┐                    ┌─► wishes that came meanwhile ─► the next snapshot ─► one outcome for all of them
    wish ─┴─► a snapshot ──────┘

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

from psengine.errors import SnapshotError
from psengine.parameter_server.server.core.shard import Shard
from psengine.parameter_server.server.durability.log_thread import LogThread
from psengine.parameter_server.server.log.log import delete_before
from psengine.parameter_server.server.snapshots.files import JobState, LogPlaces
from psengine.parameter_server.server.snapshots.store import SnapshotStore
from psengine.parameter_server.server.transport.shard_thread import ShardThread
from psengine.parameter_server.status_model import SnapshotStatus

logger = logging.getLogger(__name__)

# Bounds what is remembered of messages that ask for a snapshot.
MAX_WISHES = 1024
# A shard copies everything it holds while it captures.
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
        threads: the shards, started.
        interval_s: seconds between snapshots; one that would change nothing is not written. 0: only on wish.
        generation: the one that the server is durable to at the start.
        note: takes an event's kind and text.
    """

    def __init__(
        self,
        store: SnapshotStore,
        threads: Sequence[ShardThread],
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
        self._threads = threads
        self._interval_s = interval_s
        self._note = note
        self._logs: Sequence[LogThread] = ()
        self._places: LogPlaces = {}
        # When ``generation`` was last known to be all that the shards hold.
        self._current_s: float | None = None
        self._changed = threading.Condition()
        # Wishes that no snapshot has been begun for.
        self._wishes: list[Future[SnapshotOutcome]] = []
        self._has_ended = False

    def keep_logs(self, logs: Sequence[LogThread], places: LogPlaces) -> None:
        """Before the start: cut these logs, one for each shard, with every snapshot, and delete what is not needed.

        Args:
            logs: none where the server writes none.
            places: where logs begin that are not cut.
        """
        self._logs, self._places = logs, dict(places)

    def begin(self, *, is_ours: bool = True) -> Future[SnapshotOutcome]:
        """Make durable what is there now, or later. Callable from any thread.

        Args:
            is_ours: the server itself asks, and never finds too many waiting.
        """
        wish: Future[SnapshotOutcome] = Future()
        with self._changed:
            if not self._has_ended and (is_ours or len(self._wishes) < MAX_WISHES):
                self._wishes.append(wish)
                self._changed.notify()
                return wish
        text = f"the server ends, or too many wait for a snapshot (expected at most {MAX_WISHES}); ask again later"
        wish.set_result(SnapshotOutcome(self.generation, text))
        return wish

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
                self._changed.wait_for(lambda: self._wishes or self._has_ended, timeout_s)
                wishes, self._wishes = self._wishes, []
                if self._has_ended and not wishes:
                    return
            outcome = SnapshotOutcome(self.generation) if self._is_current() else self.write()
            if not wishes:
                due_s = time.monotonic() + self._interval_s
            for wish in wishes:
                wish.set_result(outcome)

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
            return False  # ``write`` fails likewise, and reports it
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
        self._current_s = started_s
        self.last_seconds = time.monotonic() - started_s
        for thread in self._threads:
            thread.ask(partial(thread.shard.durable.note, generation))
        logger.info("durable to %s, generation %d, after %.2f s", self.store.directory, generation, self.last_seconds)
        self._note("snapshot", f"generation {generation} is written")
        return SnapshotOutcome(generation)

    def _capture(self) -> list[list[JobState]]:
        """What all shards hold; where there is a log, with what is under way."""
        if self._logs:
            cuts = [t.ask(partial(_cut, t.shard, log)) for t, log in zip(self._threads, self._logs, strict=True)]
            found = [cut.result(CAPTURE_DEADLINE_S) for cut in cuts]
            self._places |= {thread.shard.index: place for thread, (place, _) in zip(self._threads, found, strict=True)}
            return [states for _, states in found]
        futures = [thread.ask(thread.shard.durable.capture) for thread in self._threads]
        return [future.result(CAPTURE_DEADLINE_S) for future in futures]

    def _save(self, shards: Sequence[list[JobState]]) -> int:
        generation = self.store.save(shards, self._places)
        self._delete_segments()
        return generation

    def _delete_segments(self) -> None:
        """Delete segments of logs that no generation needs any more."""
        try:
            delete_before(self.store.disk, self.store.needed_segments())
        except (OSError, SnapshotError) as error:
            logger.warning("older segments of the log could not be deleted: %s", error)

    def _find_newest(self) -> None:
        """Somebody may have removed the generation that the server was durable to; where that is not seen, it stays."""
        try:
            newest = self.store.newest
        except OSError:
            return
        if newest == self.generation:
            return
        self.generation = newest
        for thread in self._threads:
            thread.ask(partial(thread.shard.durable.note, None))


def _cut(shard: Shard, log: LogThread) -> tuple[tuple[int, int], list[JobState]]:
    """In the shard's thread: where the log goes on, and the state that it goes on from."""
    return log.cut(), shard.durable.capture_whole()
