"""What a server keeps through its end, as its operator chose: nothing, snapshots, or everything that it acknowledged.

memory      nothing
snapshot    generations of snapshots; what was acknowledged after the newest one is lost
log         the same, and a log of every update: an update is acknowledged once it is on the disk
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from psengine.errors import SnapshotError
from psengine.parameter_server.server.core.shard import Shard
from psengine.parameter_server.server.durability.log_thread import LogThread
from psengine.parameter_server.server.durability.restoring import Restored, restore
from psengine.parameter_server.server.durability.snapshot_thread import SnapshotThread
from psengine.parameter_server.server.log.log import LogStart, delete_before
from psengine.parameter_server.server.snapshots.store import SnapshotStore
from psengine.parameter_server.server.transport.shard_thread import ShardThread
from psengine.parameter_server.status_model import LogStatus

logger = logging.getLogger(__name__)


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
        self._restored = Restored(None, "", [])
        self.logs: list[LogThread] = []
        self.snapshots: SnapshotThread

    def restore(self, shards: Sequence[Shard]) -> str:
        """Restore what is durable into ``shards``; how durable the server is, for people.

        Raises:
            SnapshotError: there is something, and it cannot be taken over; or no new base could be written for a log.
        """
        try:
            self._restored = restored = restore(self._store, shards)
        except OSError as error:
            raise SnapshotError(f"{error.filename} cannot be read: {error.strerror}") from error
        for text in restored.notes:
            logger.warning("%s", text)
        if restored.notes:
            self._note("snapshot_failed", "; ".join(restored.notes))
        if restored.generation is not None or restored.records:
            self._note("restored", f"taken over: {restored.summary}")
        if restored.records or (self._keeps_log and restored.is_something):
            # What was read may not be durable yet, because the last life may have died before its fsync: a log goes on
            # from a generation of its own life, which also has as many shards as there are, and is not replayed again.
            generation = self._store.save([shard.durable.capture_whole() for shard in shards], restored.places)
            for shard in shards:
                shard.durable.note(generation)
            delete_before(self._store.disk, self._store.needed_segments())
            self._restored = Restored(generation, "", [], restored.places)
            return f"{restored.summary}, written as generation {generation}"
        return restored.summary

    def start(self, threads: Sequence[ShardThread], epoch: int) -> None:
        """Write logs and snapshots of these shards, whose threads have not started."""
        places = self._restored.places
        for thread in threads if self._keeps_log else ():
            start = LogStart(thread.shard.index, *places.get(thread.shard.index, (1, 0)), epoch)
            log = LogThread(self._store.disk, start, thread.answers, self._note, lambda: self.snapshots.begin())
            thread.answers.log = log.log
            thread.shard.jobs.journal.append = log.append
            self.logs.append(log)
        generation = self._restored.generation
        self.snapshots = SnapshotThread(self._store, threads, self._interval_s, generation, self._note)
        self.snapshots.keep_logs(self.logs, places)
        for one in (*self.logs, self.snapshots):
            one.start()

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
