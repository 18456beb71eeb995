"""What a server keeps through its end, as its operator chose: nothing, snapshots, or everything that it acknowledged.

memory      nothing
snapshot    generations of snapshots; what was acknowledged after the newest one is lost
log         the same, and a log of every update: an update is acknowledged once it is on the disk
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from psengine.errors import SnapshotError
from psengine.parameter_server.server.coordinator.coordinators import Coordinators
from psengine.parameter_server.server.durability.log_thread import LogThread
from psengine.parameter_server.server.durability.restoring import Recovered, place_into, recover
from psengine.parameter_server.server.durability.snapshot_thread import SnapshotThread
from psengine.parameter_server.server.log.log import LogStart
from psengine.parameter_server.server.log.reading import WITHOUT_LOG
from psengine.parameter_server.server.shard.shard import Shard
from psengine.parameter_server.server.snapshots.store import SnapshotStore
from psengine.parameter_server.server.transport.shard_thread import ShardThread
from psengine.parameter_server.status_model import LogStatus

logger = logging.getLogger(__name__)

# How long the first file of a log may take to be there.
START_S = 5.0
# Of the room that a log leaves for a snapshot: what describes the chunks.
_SLACK_BYTES = 1 << 20


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
        versions: dict[str, int] = {}
        for job in (job for jobs in recovered.shards for job in jobs):
            versions[job.name] = max([versions.get(job.name, 0), *(chunk.meta["version"] for chunk in job.chunks)])
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
