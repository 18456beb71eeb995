"""What a server keeps through its end, as its operator chose: nothing, snapshots, or everything that it acknowledged.

memory      nothing
snapshot    generations of snapshots; what was acknowledged after the newest one is lost
log         the same, and a log of every update: an update is acknowledged once it is on the disk
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from psengine.errors import SnapshotError
from psengine.parameter_server.server.durability.log_thread import LOOK_S, LogThreads
from psengine.parameter_server.server.durability.restoring import Recovered, place_into, recover
from psengine.parameter_server.server.log.disk import DirectoryDisk
from psengine.parameter_server.server.log.log import BEGINNING, ShardLog
from psengine.parameter_server.server.log.reading import WITHOUT_LOG
from psengine.parameter_server.server.settings import ServerSettings
from psengine.parameter_server.server.shard.shard import Shard
from psengine.parameter_server.server.snapshots.files import ServerState
from psengine.parameter_server.server.snapshots.generations import LOW_BYTES, Generations
from psengine.parameter_server.server.transport.shard_thread import ShardThread
from psengine.protocol.messages import DURABILITY_TIERS
from psengine.status_port.status_model import LogStatus, SnapshotStatus

logger = logging.getLogger(__name__)

# How long the first file of a log may take to be there.
START_S = 5.0
# A shard copies everything it holds while it captures; its log writes what was under way, and a file's beginning.
CAPTURE_DEADLINE_S = 60.0
# How long a thread may take to end.
END_S = 5.0
# How often people are told of a disk that is almost full, and a snapshot is written, after which older segments go.
LOW_REPEAT_S = 60.0
# A file that is there while the log is written by a server of a pair.
PAIRED = "of-a-pair"
# Of the room that a log leaves for a snapshot: what describes the chunks.
_SLACK_BYTES = 1 << 20


class Durability(threading.Thread):
    """What a server process keeps in a directory: ``restore``, then ``begin``, then ``end`` and ``end_logs``.

    The thread writes generations of what all shards hold, one at a time.

    ::

        wish ─┐                    ┌─► wishes that came meanwhile ─► the next snapshot ─► one answer for all of them
        wish ─┴─► a snapshot ──────┘

        shard's thread   cut the log ─ copy the state, at that record
        log's writer          └─► the new segment is on the disk ─┐
        this thread                                                └─► the generation is written, older files go

    At most one snapshot is written and one waits, however many ask; the snapshot that answers a wish began after it.
    While nothing changes, nothing is written. A failure is logged and shown, and never ends the server: it stays
    durable to the older generation.

    Args:
        settings: name a directory, which is created if it is absent; its parent must exist.
        stack: releases it.
        note: takes an event's kind and text.

    Attributes:
        logs: of the shards; none where the server writes none.
        epoch, known, previous: see ``restore``.
        was_paired: the log was written by a server of a pair.

    Raises:
        SnapshotError: the directory cannot be had.
    """

    def __init__(self, settings: ServerSettings, stack: ExitStack, note: Callable[[str, str], None]) -> None:
        super().__init__(name="psengine-snapshots", daemon=True)
        self.logs: list[LogThreads] = []
        self.known: dict[str, Any] = {}
        self.epoch = self.previous = 0
        assert settings.snapshot_dir is not None, "a tier that keeps something has a directory"
        self._disk = DirectoryDisk(settings.snapshot_dir)
        self._store = Generations(self._disk, keeps_history=settings.keep_history)
        self._keeps_log = "log" in DURABILITY_TIERS[settings.tier]
        self._is_paired, self._note = settings.has_replica, note
        self._recovered = Recovered()
        self._threads: Sequence[ShardThread] = ()
        interval_s = settings.snapshot_interval_s
        self._status = SnapshotStatus(
            interval_s=interval_s, generation=None, age_s=None, last_seconds=0.0, failures=0, last_error=""
        )
        self._durable_changes: int | None = None  # of the shards, that ``generation`` has
        self._current_s: float | None = None  # when ``generation`` was last known to be all that the shards hold
        self._held_bytes: dict[int, int] = {}  # by shard
        self._free_bytes: int | None = None
        self._shortage = 0  # of room: 1 low, 2 full
        self._told_low_s = 0.0
        self._changed = threading.Condition()
        self._wish: Future[int] | None = None  # of all for whom no snapshot has been begun
        self._has_ended = False
        stack.callback(self._disk.unlock)
        try:
            self._disk.make()
            self._store.begin()
            self.was_paired = PAIRED in self._disk.list()
        except OSError as error:
            raise SnapshotError(
                f"a snapshot directory must be writable, and its parent must exist (got {error.strerror}: "
                f"{error.filename or self._disk}); choose another one for {self._disk}"
            ) from error

    # ---- start -------------------------------------------------------------------------------------------------

    def restore(self, shards: Sequence[Shard], drawn: int) -> str:
        """Restore what is durable, before the first message; how durable the server is, for people.

        What coordinators knew is ``known`` then, the epoch of the life whose log this is ``previous``, and that of this
        life ``epoch``.

        Args:
            shards: empty.
            drawn: an epoch by the clock.

        Raises:
            SnapshotError: there is something, and it cannot be taken over.
        """
        try:
            self._recovered = recovered = recover(self._store)
            self.epoch = self._store.begin_life(drawn, *(end.epoch for end in recovered.ends.values()))
        except OSError as error:
            raise SnapshotError(f"{error.filename or self._disk} cannot be used: {error.strerror}") from error
        if recovered.notes:
            self._note("snapshot_failed", f"left out: {'; '.join(recovered.notes)}")
        summary = f"durable to {self._disk}, {recovered.describe()}"
        if recovered.generation is not None or recovered.records:
            place_into(recovered, shards, f"Generation {recovered.generation or 0} in {self._disk}")
            self.known = recovered.coordinators
            self.previous = recovered.ends[0].epoch if 0 in recovered.ends else 0
            self._note("restored", f"restored: {summary}")
        return summary

    def begin(self, threads: Sequence[ShardThread], epoch: int, *, is_copy: bool = False) -> None:
        """Write logs and snapshots of these shards from now on, from a first generation.

        Args:
            threads: if they have started, nobody is told of an update yet.
            epoch: of this life.
            is_copy: what they hold is another server's, and does not go on from what was read.

        Raises:
            SnapshotError: a log, or the generation that it goes on from, could not be written.
        """
        recovered, self._recovered, self._threads = self._recovered, Recovered(), threads
        deadline_s = CAPTURE_DEADLINE_S if is_copy else START_S
        if is_copy and self._keeps_log:  # who dies before the first generation does not go from the older to this log
            self._store.mark(WITHOUT_LOG)
        if not (self._is_paired and self._keeps_log):
            self._disk.delete(PAIRED)
        elif not self.was_paired:
            self._store.mark(PAIRED)
        for thread in threads if self._keeps_log else ():
            last = recovered.ends.get(thread.shard.index, BEGINNING)
            # A gap: nobody goes from what another server had told to what this one had held.
            last = last._replace(number=last.number + is_copy)
            log = ShardLog(self._disk, thread.shard.index, epoch, last)
            self.logs.append(LogThreads(log, thread.answers, self._note, self._room_bytes))
            thread.ask(partial(thread.add_sink, log)).result(deadline_s)
        if is_copy and self._store.keeps_history and self._store.newest is not None:
            self._note("anew", f"the history in {self._disk} is deleted, for a copy of the leader; that one's goes on")
        if is_copy or WITHOUT_LOG in self._disk.list():
            self._store.begin_anew()
        self._status = replace(self._status, generation=recovered.generation)
        self._durable_changes = self._changes()
        if self.logs or recovered.records or is_copy:
            # What was read may not be durable yet, because the last life may have died before its fsync: this life goes
            # on from a generation of its own.
            self._write_first(deadline_s)
        self.start()

    def _write_first(self, deadline_s: float) -> None:
        try:
            self._write(deadline_s)
        except SnapshotError as error:
            self.end_logs()
            needed_bytes = _SLACK_BYTES + sum(thread.shard.memory_bytes() for thread in self._threads)
            raise SnapshotError(
                f"{error}. A start writes a generation and begins a log (expected room for {needed_bytes} bytes in"
                f" {self._disk}, got {self._disk.free_bytes()}). Fix: delete other files on that disk, or make it"
                " larger"
            ) from error
        self._disk.delete(WITHOUT_LOG)

    # ---- for other threads -------------------------------------------------------------------------------------

    def snapshot(self) -> Future[int]:
        """Make durable what is there now, or later: the generation that has it, or a SnapshotError."""
        with self._changed:
            self._wish = self._wish or Future()
            self._changed.notify()
            return self._wish

    def snapshot_status(self) -> SnapshotStatus:
        """The newest generation, its age, and the failures."""
        age_s = None if self._current_s is None else round(time.monotonic() - self._current_s, 3)
        return replace(self._status, age_s=age_s)

    def log_status(self) -> tuple[LogStatus, ...]:
        """Of all shards."""
        return tuple(log.status(self._free_bytes) for log in self.logs)

    def end(self) -> None:
        """Write one more snapshot if one was wished for, then end the thread, before the shards' threads end."""
        with self._changed:
            self._has_ended = True
            self._changed.notify()
        self.join(END_S)

    def end_logs(self) -> None:
        """End their threads, after the shards' threads."""
        for log in self.logs:
            log.end(END_S)

    # ---- in this thread ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """The loop."""
        interval_s = self._status.interval_s or float("inf")
        due_s = time.monotonic() + interval_s
        while True:
            with self._changed:
                wait_s = min(LOOK_S, max(0.0, due_s - time.monotonic()))
                self._changed.wait_for(lambda: self._wish or self._has_ended, wait_s)
                wish, self._wish = self._wish, None
            if self._has_ended and wish is None:
                return
            is_low = self._is_low()
            if wish is None and time.monotonic() < due_s and not is_low:
                continue
            wish = wish or Future()
            try:
                wish.set_result(self._current() or self._write())
            except SnapshotError as error:
                wish.set_exception(error)
            due_s = time.monotonic() + interval_s

    def _current(self) -> int | None:
        """The newest generation, where it is still there and nothing has changed since it was captured."""
        asked_s = time.monotonic()
        if self._store.newest != self._status.generation or self._changes() != self._durable_changes:
            return None
        self._current_s = asked_s
        return self._status.generation

    def _write(self, deadline_s: float = CAPTURE_DEADLINE_S) -> int:
        """Capture and write one generation; its number.

        Args:
            deadline_s: how long shards, and then their logs, may take.

        Raises:
            SnapshotError: it was not written.
        """
        started_s, changes = time.monotonic(), self._changes()
        try:
            generation = self._store.save(self._capture(deadline_s))
        except Exception as error:
            text, newest = str(error) or repr(error), self._store.newest  # somebody may have removed what there was
            failures = self._status.failures + 1
            self._status = replace(self._status, generation=newest, failures=failures, last_error=text)
            self._note("snapshot_failed", f"a snapshot was not written: {text}")
            if not isinstance(error, SnapshotError):
                logger.exception("a snapshot was not written")
            raise SnapshotError(text) from error
        self._current_s, self._durable_changes = started_s, changes
        seconds = round(time.monotonic() - started_s, 3)
        self._status = replace(self._status, generation=generation, last_seconds=seconds, last_error="")
        self._note("snapshot", f"durable to {self._disk}, generation {generation}, after {seconds} s")
        return generation

    def _capture(self, deadline_s: float) -> ServerState:
        """What all shards hold, each at the record at which its log is cut."""
        state = ServerState([[] for _ in self._threads])
        generation, kept = self._store.last + 1, self._store.kept_rows()
        asked = [thread.ask(partial(self._capture_shard, thread, state, generation, kept)) for thread in self._threads]
        for one in asked:
            one.result(deadline_s)
        for shard, place in state.places.items():
            self.logs[shard].await_begun(place.segment, deadline_s)
        return state

    def _capture_shard(self, thread: ShardThread, state: ServerState, generation: int, kept: Collection[int]) -> None:
        """In the shard's thread."""
        shard = thread.shard.index
        state.shards[shard] = thread.shard.capture(generation, kept)
        if thread.coordinators is not None or thread.known:
            known = thread.known if thread.coordinators is None else thread.coordinators.to_meta()
            state.coordinators = {number: one for number, one in known.items() if one is not None}
        if self.logs:
            state.places[shard] = self.logs[shard].log.cut()

    def _changes(self) -> int:
        return sum(thread.shard.changes for thread in self._threads)

    # ---- room --------------------------------------------------------------------------------------------------

    def _room_bytes(self) -> int:
        """What logs may fill: the next generation needs the rest."""
        return self._disk.free_bytes() - self._reserved_bytes()

    def _reserved_bytes(self) -> int:
        return _SLACK_BYTES + max(self._store.needed_bytes, sum(self._held_bytes.values()))

    def _note_held(self, shard: Shard) -> None:
        self._held_bytes[shard.index] = shard.memory_bytes()

    def _is_low(self) -> bool:
        """Look at the logs' room; whether a snapshot should be written, after which older segments go."""
        if not self.logs:
            return False
        for thread in self._threads:
            thread.ask(partial(self._note_held, thread.shard))
        low_bytes = max(LOW_BYTES, 2 * self._reserved_bytes())
        try:
            self._free_bytes = free_bytes = self._disk.free_bytes()
        except OSError:
            return False  # the logs fail by it
        before, now_s = self._shortage, time.monotonic()
        self._shortage = 2 if any(log.is_full for log in self.logs) else int(free_bytes < low_bytes)
        if self._shortage <= before and (not self._shortage or now_s < self._told_low_s + LOW_REPEAT_S):
            return False
        self._told_low_s = now_s
        self._note(
            "log_low",
            f"the log's disk is almost full (expected {low_bytes >> 20} MiB of room, got {free_bytes >> 20}): once it"
            " is full, nothing is acknowledged. A snapshot is written now, after which older segments go",
        )
        return True
